// Python beside the page: takes {id, message}, answers {id, reply}, and now and then {id, looked: layouts so far}.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const beside = (name) => new URL(name, import.meta.url).href;

async function start() {
  const [python, archive] = await Promise.all([
    loadPyodide({ indexURL: beside("pyodide/") }),
    fetch(beside("pardemo.zip")).then((response) => {
      if (!response.ok) throw new Error(`pardemo.zip: ${response.status}`);
      return response.arrayBuffer();
    }),
  ]);
  python.unpackArchive(archive, "zip", { extractDir: "/planner" });
  python.runPython("import sys; sys.path.insert(0, '/planner')");
  return python.pyimport("pardemo.planner.layouts.url_query").for_a_page();
}

const started = start();
started.then(() => postMessage({ ready: true }), (error) => postMessage({ broken: String(error.message || error) }));

onmessage = async ({ data: { id, message } }) => {
  try {
    const reply = await started;
    const looked = (count) => postMessage({ id, looked: count });
    postMessage({ id, reply: JSON.parse(reply(JSON.stringify(message), looked)) });
  } catch (error) {
    postMessage({ id, broken: String(error.message || error).trim().split("\n").pop() });
  }
};
