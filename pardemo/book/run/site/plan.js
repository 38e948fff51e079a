"use strict";
// The page that plans: the form is the question, the address carries it, a worker answers it by Python.
(() => {
  const plan = document.getElementById("plan"), form = document.getElementById("question");
  const status = document.getElementById("status"), answer = document.getElementById("answer");
  const FIELDS = ["model", "config", "gpu", "gpus", "host", "link", "sequence", "samples", "program", "precision", "rank", "target", "price"];
  const RESTART_MS = 2500; // a search that has run this long is given up for a new question: Python starts as fast
  const field = (name) => document.getElementById(name);
  const served = location.protocol !== "file:", able = "python" in plan.dataset && served;

  // ---- the question: form <-> address ----
  function question() {
    const asked = {};
    for (const name of FIELDS) if (field(name).value.trim()) asked[name] = field(name).value.trim();
    if (asked.model) delete asked.config;
    return asked;
  }
  function fill(asked) {
    for (const name of FIELDS) {
      const input = field(name), value = asked[name] || "";
      if (input.tagName === "SELECT" && ![...input.options].some((option) => option.value === value)) {
        const known = [...input.options].find((option) => option.text === value); // the usual program by its name
        if (known) { input.value = known.value; continue; }
        input.add(new Option(value, value));
      }
      input.value = value;
    }
    if (!asked.gpu) field("gpu").value = JSON.parse(plan.dataset.first).gpu;
    follow();
  }
  function follow() { // what depends on the fields: sliders, the box for a configuration, the command
    field("config-field").hidden = field("model").value !== "";
    for (const slider of form.querySelectorAll("[data-for]")) {
      const value = amount(slider.dataset.for), values = slider.dataset.values.split(" ").map(Number);
      if (value > 0) slider.value = values.reduce((best, each, place) => Math.abs(Math.log(each / value)) < Math.abs(Math.log(values[best] / value)) ? place : best, 0);
      slider.setAttribute("aria-valuetext", values[slider.value]);
    }
    field("command").textContent = command(question());
  }
  function amount(name) { // a field's number, or what stands for it: a link's name, a default
    const text = field(name).value.trim() || field(name).dataset.usual || (name === "samples" ? field("gpus").value : "");
    const named = name === "link" && [...field("links").options].find((option) => option.value === text);
    return named ? parseFloat(named.text) : Number(text.replaceAll(",", ""));
  }
  const quoted = (text) => /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;
  function command(asked) { // asked.py has the same; here for a page without Python
    const each = Number(asked.host), gpus = Number(asked.gpus);
    const hosts = each > 0 ? String(Math.max(1, Math.floor(gpus / each))) : "";
    const options = [["model", asked.model || "config.json"], ["gpu", asked.gpu], ["gpus", asked.gpus], ["hosts", hosts], ["link", asked.link],
      ["sequence", asked.sequence], ["per-step", asked.samples], ["program", asked.program], ["precision", asked.precision],
      ["rank", asked.rank], ["target", asked.target], ["price", asked.price]];
    return ["pardemo plan --search", ...options.filter(([, value]) => value).map(([name, value]) => `--${name} ${quoted(value)}`)].join(" ");
  }
  const carried = () => new URLSearchParams(location.hash.slice(1));
  function fromAddress() {
    if (location.hash.includes("=")) fill(Object.fromEntries(carried()));
    else if (!form.dataset.filled) fill(JSON.parse(plan.dataset.first));
    else return; // the address of a heading
    form.dataset.filled = "";
    ask();
  }

  // ---- the worker ----
  // asking: {id, message, done} of what the worker has; next: the newest of what waits for it
  let worker, ready = false, last = 0, busySince = 0, asking = null, next = null;
  function start() {
    ready = false;
    worker = new Worker(`${plan.dataset.folder}/worker.mjs`, { type: "module" });
    worker.onerror = () => broken("Python did not start");
    worker.onmessage = ({ data }) => {
      if (data.ready) { ready = true; hand(); return; }
      if (data.broken) return broken(`Python ended: ${data.broken}`);
      if (!asking || data.id !== asking.id) return;
      if (data.looked) { if (asking.message.question && !next) say(`searching … ${data.looked.toLocaleString("en")} layouts so far`); return; }
      const { done } = asking;
      asking = null;
      next ? hand() : done(data.reply);
    };
  }
  function send(message, done) {
    next = { id: ++last, message, done };
    if (asking && performance.now() - busySince > RESTART_MS) { worker.terminate(); asking = null; start(); }
    hand();
  }
  function hand() { // gives the worker what waits, if it has nothing to do
    if (!ready || asking || !next) return;
    [asking, next, busySince] = [next, null, performance.now()];
    if (asking.message.question) say("searching …");
    worker.postMessage({ id: asking.id, message: asking.message });
  }
  function broken(why) { // Python may be gone: the next question starts it anew
    worker.terminate();
    worker = asking = next = null;
    ready = false;
    answered({});
    say(`${why}; the command above answers the same question`, true);
  }
  function say(text, refused = false) { status.textContent = text; status.classList.toggle("refused", refused); }

  let waiting = 0;
  function ask() {
    clearTimeout(waiting);
    if (!able) {
      say(served ? "This site was built without Pyodide: the command above answers the question in a shell." :
        "From the file system a browser starts no Python: run python3 -m http.server in this folder, then open http://localhost:8000/plan.html.");
      return;
    }
    if (!worker) start();
    say(ready ? "searching …" : "starting Python …");
    answer.setAttribute("aria-busy", "true");
    send({ question: question() }, (reply) => {
      answered(reply);
      if (reply.error) { say(reply.error, true); return; }
      document.getElementById("command").textContent = reply.command;
      show(reply, (performance.now() - busySince) / 1000);
    });
  }

  function answered(reply) { // takes away what was answered before; what is refused stands at its field
    answer.setAttribute("aria-busy", "false");
    for (const name of FIELDS) {
      const wrong = reply.error && reply.field === name;
      field(`${name}-wrong`).textContent = wrong ? reply.error : "";
      wrong ? field(name).setAttribute("aria-invalid", "true") : field(name).removeAttribute("aria-invalid");
    }
    answer.replaceChildren();
  }

  // ---- the answer ----
  const GB = 1e9, short = (value) => value >= 100 ? Math.round(value).toLocaleString("en") : value.toPrecision(3);
  function element(tag, properties = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) name in made ? made[name] = value : made.setAttribute(name, value);
    made.append(...children);
    return made;
  }
  const kindClass = (kind, name) => `${kind}-${name.replaceAll(" ", "-")}`;
  function bar(kind, label, parts, low, high, scale, unit, marks) {
    const track = element("div", { className: "track" });
    const place = (node, from, to) => { node.style.left = `${100 * from / scale}%`; if (to !== undefined) node.style.width = `${100 * (to - from) / scale}%`; track.append(node); };
    let end = 0;
    const said = [];
    for (const [name, value] of Object.entries(parts)) {
      place(element("span", { className: `part ${kindClass(kind, name)}`, title: `${name}: ${short(value)} ${unit}` }), end, end + value);
      end += value;
      said.push(`${name} ${short(value)}`);
    }
    place(element("span", { className: "interval", title: `in 4 of 5 cases ${short(low)} to ${short(high)} ${unit}` }), low, high);
    for (const [className, title, at] of marks) place(element("span", { className: `mark ${className}`, title }), at);
    track.setAttribute("role", "img");
    track.setAttribute("aria-label", `${label}, ${unit}: ${said.join(", ")}; in 4 of 5 cases ${short(low)} to ${short(high)} in all`);
    return element("div", { className: "bar" }, element("span", {}, label), track);
  }
  function legend(kind, lists, order) {
    const names = order.filter((name) => lists.some((parts) => parts[name] > 0));
    const swatch = (className, name) => element("li", {}, element("i", { className }), name);
    const more = kind === "memory" ? [swatch("mark", "what a plan may fill"), swatch("mark has", "what the GPU has")] : [swatch("interval", "4 of 5 cases lie within")];
    return element("ul", { className: "legend", "aria-label": kind === "memory" ? "colours of memory" : "colours of time" }, ...names.map((name) => swatch(kindClass(kind, name), name)), ...more);
  }
  function numbers(layout) {
    const rows = (parts, unit, by) => Object.entries(parts).filter(([, value]) => value > 0).map(([name, value]) =>
      element("tr", {}, element("td", {}, name), element("td", { className: "figure" }, `${short(value / by)} ${unit}`)));
    return element("details", {}, element("summary", {}, "numbers"),
      element("div", { className: "scroll" }, element("table", {}, element("tbody", {}, ...rows(layout.parts, "s", 1), ...rows(layout.lines, "GB", GB)))));
  }
  function figures(pairs) {
    return element("dl", { className: "figures" }, ...pairs.filter(([, value]) => value).map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  }
  function show(reply, seconds) {
    const { shown, names, words } = reply, fits = reply.json.best.length > 0;
    say(fits ? `The best: ${names[0]}, ${short(shown[0].seconds)} s a step` : `Nothing fits; the least memory has ${names[0]}, ${short(shown[0].peak_bytes / GB)} GB of ${short(reply.room_bytes / GB)}`, !fits);
    const longest = 1.02 * Math.max(...shown.map((each) => Math.max(each.seconds, each.seconds_high)));
    const fullest = 1.02 * Math.max(reply.capacity_bytes, ...shown.map((each) => Math.max(each.peak_bytes, each.peak_bytes_high)));
    const inOrder = (of, order, by) => Object.fromEntries(order.filter((name) => of[name] > 0).map((name) => [name, of[name] / by]));
    const cards = shown.map((each, place) => {
      const money = reply.money_per_billion_tokens[place];
      return element("li", {},
        element("h2", {}, element("span", { className: "place" }, fits ? `${place + 1}.` : "–"), names[place]), element("p", { className: "words" }, words[place]),
        figures([["a step", `${short(each.seconds)} s`], ["in 4 of 5 cases", `${short(each.seconds_low)} to ${short(each.seconds_high)} s`],
          ["tokens/s/GPU", short(each.tokens_per_s)], ["MFU", `${(100 * each.mfu).toFixed(1)} %`],
          ["memory", `${short(each.peak_bytes / GB)} GB, ${Math.round(100 * each.headroom)} % free`], ["cost of 10⁹ tokens", money === null ? "" : short(money)]]),
        bar("time", "time", inOrder(each.parts, reply.parts, 1), each.seconds_low, each.seconds_high, longest, "s", []),
        bar("memory", "memory", inOrder(each.lines, reply.lines, GB), each.peak_bytes_low / GB, each.peak_bytes_high / GB,
          fullest / GB, "GB", [["", "what a plan may fill", reply.room_bytes / GB], ["has", "what the GPU has", reply.capacity_bytes / GB]]),
        numbers(each));
    });
    const warning = reply.json.warning ? [element("li", {}, reply.json.warning)] : [];
    answer.replaceChildren(
      ...reply.planned.map((line) => element("p", { className: "note" }, line)),
      legend("time", shown.map((each) => each.parts), reply.parts), legend("memory", shown.map((each) => each.lines), reply.lines),
      element("ol", { className: "layouts" }, ...cards),
      element("ul", { className: "notes" }, ...reply.notes.map((note) => element("li", {}, note)), ...warning,
        element("li", {}, `${reply.json.tried.toLocaleString("en")} layouts divide the job, ${reply.json.fitting.toLocaleString("en")} of them fit; ${seconds.toFixed(1)} s here`)));
    if (fits) answer.append(assumptions(reply.assumptions));
    answer.reply = reply; // for tests, and for who looks
  }
  function assumptions(names) { // each is a search of its own, so they are asked when they are looked for
    const list = element("ul", { "aria-live": "polite" }), folded = element("details", { id: "assumptions" }, element("summary", {}, "If an assumption changes"), list);
    folded.addEventListener("toggle", () => {
      if (list.children.length) return;
      const each = ([name, ...rest]) => {
        if (!name || !folded.isConnected || asking || next) return;
        const line = element("li", {}, `if ${name}: …`);
        list.append(line);
        send({ if: name }, (reply) => { line.textContent = reply.line || reply.error; each(rest); });
      };
      each(names);
    });
    return folded;
  }

  // ---- what a reader does ----
  function changed() {
    follow();
    history.replaceState(null, "", `#${new URLSearchParams(question())}`);
    clearTimeout(waiting);
    waiting = setTimeout(ask, 350);
  }
  form.addEventListener("submit", (event) => { event.preventDefault(); changed(); });
  form.addEventListener("input", (event) => {
    const slider = event.target.closest("[data-for]");
    if (slider) field(slider.dataset.for).value = slider.dataset.values.split(" ")[slider.value];
    changed();
  });
  window.addEventListener("hashchange", fromAddress);
  async function copy(button, text) {
    const before = button.textContent;
    try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; } catch { prompt("To copy:", text); }
    setTimeout(() => { button.textContent = before; }, 1500);
  }
  const address = () => `${location.href.split("#")[0]}#${new URLSearchParams(question())}`;
  document.getElementById("copy-link").addEventListener("click", (event) => copy(event.currentTarget, address()));
  document.getElementById("copy-command").addEventListener("click", (event) => copy(event.currentTarget, field("command").textContent));
  fromAddress();
})();
