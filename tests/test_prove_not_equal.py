"""What was called equal, or by a wrong name, and is not: layouts that end early, dead models, overwritten parts."""

import sys

import pytest
import torch
from conftest import says

from pardemo import prove
from pardemo.script.compare.runs import ProveError

HEAD = """
import sys, torch, torch.distributed as dist
from torch import nn
def say(name, default):  # an argument of the layout's
    return next((float(word.partition("=")[2]) for word in sys.argv[1:] if word.startswith(name + "=")), default)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = torch.randn(6, 8, 8, generator=torch.Generator().manual_seed(7))
def mine(step):
    return data[step].chunk(ranks)[rank]
def average(parameters):
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
"""

ENDS_EARLY = """
net = nn.Linear(8, 8); optimizer = torch.optim.SGD(net.parameters(), say("rate", 0.1))
net.register_buffer("bank", torch.ones(300, 300))
for step in range(int(say("steps", 4))):
    net.bank[step] *= 1 + rank * say("bank", 0)
    net(mine(step)).square().mean().backward(); average(net.parameters()); optimizer.step(); optimizer.zero_grad()
"""

ALONE = """
import sys, torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(8, 8); optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    net(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
"""

DEAD = """
net = nn.Linear(8, 8); optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    (0 * net(mine(step))).square().mean().backward(); average(net.parameters()); optimizer.step(); optimizer.zero_grad()
"""

# one small bf16 parameter beside fp32 ones, whose gradients are 2 % too large on two ranks
MIXED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    def forward(self, x):
        return self.b(self.a(x).tanh()) * self.scale.float()
net = Net(); optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    net(mine(step)).square().mean().backward(); average(net.parameters())
    for parameter in net.parameters():
        parameter.grad *= say("times", 1.0) if ranks > 1 else 1.0
    optimizer.step(); optimizer.zero_grad()
"""

# each rank has its experts; a wrapper gives all of them rank 0's (transformers 45662)
EXPERTS = """
from torch.distributed.nn.functional import all_reduce
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        every = [nn.Linear(8, 8) for _ in range(4)]
        own = range(4 // ranks * rank, 4 // ranks * (rank + 1))
        self.first, self.head = own[0], nn.Linear(8, 8)
        self.experts = nn.ModuleList(every[place] for place in own)
    def forward(self, x):  # all rows on every rank, each for one expert
        out = torch.zeros_like(x)
        for place, expert in enumerate(self.experts):
            out = out + (torch.arange(len(x)) % 4 == place + self.first)[:, None] * expert(x)
        return self.head(x + (all_reduce(out) if ranks > 1 else out))
net = Experts()
if ranks > 1 and say("broadcast", 1):
    for parameter in net.parameters():
        dist.broadcast(parameter.data, 0)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    net(data[step]).square().mean().backward()
    for parameter in net.experts.parameters():
        parameter.grad /= ranks
    optimizer.step(); optimizer.zero_grad()
"""

# micro-batches: gradients are cleared between them, or summed over ranks behind each and divided once
MICRO = """
net = nn.Linear(8, 8); optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    parts = mine(step).chunk(2)
    for number, part in enumerate(parts):
        if number and say("clear", 0):
            optimizer.zero_grad()
        (net(part).square().mean() / 2).backward()
        if say("each", 0) and ranks > 1:
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
    for parameter in net.parameters():
        if not (say("each", 0) and ranks > 1):
            dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
    optimizer.step(); optimizer.zero_grad()
"""

# two parameters of other sizes are left out of the sum for the same reason: one finding that has both
TWO = """
net = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}); optimizer = torch.optim.SGD(net.parameters(), 0.1)
scale = nn.Parameter(torch.ones(())); optimizer.add_param_group({"params": [scale]})  # in no module
for step in range(4):
    (net["b"](net["a"](mine(step)).tanh()) * scale).square().mean().backward()
    average([net["a"].weight, net["b"].weight, net["b"].bias])
    scale.grad *= 1.2345 if ranks > 1 else 1.0
    dist.all_reduce(scale.grad); scale.grad /= ranks
    optimizer.step(); optimizer.zero_grad()
"""


ALIKE = """
net = nn.Linear(8, 8); optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    x = torch.ones(int(say("rows", 8)), 8)
    net(x).square().mean().backward(); average(net.parameters()); optimizer.step(); optimizer.zero_grad()
"""


@pytest.fixture
def proof(tmp_path):
    def run(text, layouts=("ranks=1", "ranks=2"), *words, head=HEAD, **options):
        script = tmp_path / "train.py"
        script.write_text(head + text)
        return prove.script([str(script), *words], list(layouts), **{"double": True, "steps": 3, **options})

    return run


FROZEN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
    def forward(self, x):
        with torch.no_grad():
            x = self.encoder(x * (1.1 if rank else 1.0))
        return self.head(x.tanh())
net = Net(); optimizer = torch.optim.SGD(net.head.parameters(), 0.1)
for step in range(4):
    net(mine(step)).square().mean().backward(); average(net.head.parameters())
    optimizer.step(); optimizer.zero_grad()
"""


# noise that each rank draws for its own samples, as an autoencoder's or a diffusion model's
NOISE = """
net = nn.Linear(8, 8); optimizer = torch.optim.SGD(net.parameters(), 0.1); within = say("within", 0)
net.register_forward_pre_hook(lambda net, x: (x[0] + within * torch.randn_like(x[0]),))
torch.manual_seed(rank)
for step in range(4):
    x = mine(step) if within else mine(step) + torch.randn(8 // ranks, 8)
    net(x).square().mean().backward(); average(net.parameters()); optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize("within", [0, 1])
def test_noise_that_is_another_one_in_each_layout_is_no_fault(proof, within):
    made = proof(NOISE, ("ranks=1", "ranks=2"), f"within={within}", steps=1)
    (told,) = made.failed.values()
    assert says(told, "train.py:", "randn")
    assert not made.findings


# what a library draws by the model's own outputs comes in again, as tokens that are generated or actions that are taken
TAKEN = """
net = nn.Linear(8, 8); optimizer = torch.optim.SGD(net.parameters(), 0.1)
torch.manual_seed(100 + rank)
for step in range(4):
    x = mine(step)
    with torch.no_grad():
        taken = torch.distributions.Categorical(logits=net(x)).sample()
    net(x + taken[:, None]).square().mean().backward(); average(net.parameters())
    optimizer.step(); optimizer.zero_grad()
"""


def test_samples_that_a_library_draws_are_no_fault(proof):
    made = proof(TAKEN)
    (told,) = made.failed.values()
    assert says(told, "train.py:", "multinomial")
    assert not made.findings


def test_a_part_that_runs_without_gradients_may_be_the_first(proof):
    made = proof(FROZEN)
    assert (made.findings[0].what, made.findings[0].module) == ("forward", "encoder")


def test_a_layout_that_ends_early_is_not_equal(proof):
    made = proof(ENDS_EARLY, ("ranks=1 steps=4", "ranks=2 steps=1"), "steps={steps}")
    (said,) = made.failed.values()
    assert not made.equal
    assert "1 step of 3" in said
    ran = made.as_json()["layouts"][1]
    assert [ran[f"steps_{what}"] for what in ("asked", "run", "compared")] == [3, 1, 1]
    made = proof(ENDS_EARLY, ("ranks=1 steps=2", "ranks=2 steps=2"), "steps={steps}")
    assert made.equal, "both have as many"
    assert (made.steps, made.asked) == (2, 3)
    assert "2 of 3 steps" in str(made)


def test_ranks_that_call_no_collective_are_not_equal(proof):
    made = proof(ALONE, head="")
    (said,) = made.failed.values()
    assert not made.equal
    assert "init_process_group" in said


def test_a_smaller_global_batch_of_samples_that_are_all_alike_is_told(proof):
    made = proof(ALIKE, ("ranks=1 rows=8", "ranks=2 rows=2"), "rows={rows}")
    (said,) = made.failed.values()
    assert "has 4 samples" in said
    assert proof(ALIKE, ("ranks=1 rows=8", "ranks=2 rows=4"), "rows={rows}").equal


# each rank takes the next block of samples, so that the first rank alone has all of the reference's
BLOCKS = """
net = nn.Linear(8, 8); optimizer = torch.optim.SGD(net.parameters(), 0.1)
batch, times = int(say("batch", 4)), int(say("times", 1))
for step in range(3):
    for part in data[step].split(batch)[rank * times:(rank + 1) * times]:
        (net(part).square().mean() / times).backward()
    average(net.parameters()); optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize("larger", ["ranks=2 batch=4 times=1", "ranks=1 batch=4 times=2"])
def test_a_larger_global_batch_of_which_one_micro_batch_is_the_references_is_told(proof, larger):
    made = proof(BLOCKS, ("ranks=1 batch=4 times=1", larger), "batch={batch}", "times={times}")
    (told,) = made.failed.values()
    assert "has 8 samples" in told
    assert not made.findings
    assert proof(BLOCKS, ("ranks=1 batch=8 times=1", larger), "batch={batch}", "times={times}").equal


ON_GPUS = """
device = torch.device("cuda", rank); torch.cuda.set_device(device)
net = nn.Linear(8, 8).to(device); optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    x = mine(step).to("cuda", non_blocking=True).float()
    assert device.type == "cuda" and x.is_cuda and x.device == device
    net(x).square().mean().backward(); average(net.parameters()); optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize("double", [True, False])
def test_a_script_for_gpus_runs_without_one(proof, double):
    made = proof(ON_GPUS, double=double)
    assert made.equal, str(made)


def test_a_model_that_does_not_train_is_refused(proof):
    with pytest.raises(ProveError, match=r"ranks=1.*zero"):
        proof(DEAD)
    with pytest.raises(ProveError, match=r"ranks=1.*learning rate"):
        proof(ENDS_EARLY, ("ranks=1", "ranks=2"), "rate=0")


def test_a_large_buffer_that_is_another_one_on_a_rank_is_found(proof):
    (found,) = proof(ENDS_EARLY, ("ranks=1 bank=0", "ranks=2 bank=1"), "bank={bank}").findings
    assert (found.cause, "bank on rank 1" in found.why) == ("buffers", True)


# a frozen model that is called, and a parameter in no module, which alone is trained
PROMPT = """
net = nn.Linear(8, 8).requires_grad_(False); prompt = nn.Parameter(torch.randn(8))
optimizer = torch.optim.SGD([prompt], 0.1)
for step in range(4):
    net(mine(step) + prompt).tanh().square().mean().backward(); optimizer.step(); optimizer.zero_grad()
"""


def test_a_parameter_in_no_module_beside_a_frozen_model_is_compared(proof):
    made = proof(PROMPT)
    assert [(one.cause, one.parameters) for one in made.findings] == [("not-summed", ("optimizer.0.0",))], str(made)


# a row-parallel product with its bias, in no module: each rank adds the bias before the sum, or once behind it
ROW_BIAS = """
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): x = x.clone(); dist.all_reduce(x); return x
    @staticmethod
    def backward(ctx, grad): return grad
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, grad): grad = grad.clone(); dist.all_reduce(grad); return grad
up, down, bias = torch.randn(16, 8) / 3, torch.randn(8, 16) / 4, torch.randn(8) * say("begins", 1)
first = nn.Linear(8, 8)
up, down = nn.Parameter(up.chunk(ranks, 0)[rank].clone()), nn.Parameter(down.chunk(ranks, 1)[rank].clone())
bias = nn.Parameter(bias)
optimizer = torch.optim.SGD([*first.parameters(), up, down, bias], 0.1)
for step in range(4):
    y = Copy.apply(first(data[step])) @ up.T
    y = y.tanh() @ down.T * (say("times", 1) if ranks > 1 else 1)
    y = Sum.apply(y + bias) if say("each", 0) else Sum.apply(y) + bias
    y.square().mean().backward(); optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize("begins", [1, 0])
def test_a_bias_in_no_module_that_each_rank_adds(proof, begins):
    made = proof(ROW_BIAS, ("ranks=1", "ranks=2 tp=2"), "each=1", f"begins={begins}")
    (found,) = made.findings
    assert (found.cause, found.parameters, found.step) == ("counted-per-rank", ("optimizer.0.4",), 2 - begins)
    assert says(found.why, "2 ranks", "2 times as large")
    assert "optimizer.0.4" in str(made)


def test_what_a_bias_in_no_module_does_not_explain_is_left_open(proof):
    assert proof(ROW_BIAS, ("ranks=1", "ranks=2 tp=2")).equal
    (found,) = proof(ROW_BIAS, ("ranks=1", "ranks=2 tp=2"), "times=1.5").findings
    assert found.cause == "loss"
    assert says(found.why, "nothing is seen", "optimizer.0.4")


@pytest.mark.parametrize("times", ["1.0", "1.02"])
def test_one_bf16_number_does_not_loosen_all(proof, times):
    made = proof(MIXED, ("ranks=1 times=1.0", f"ranks=2 times={times}"), "times={times}", double=False)
    assert made.equal == (times == "1.0"), str(made)
    if not made.equal:
        assert {name for one in made.findings for name in one.parameters} >= {"a.weight", "b.weight"}
        assert not any(one.cause == "sum-for-mean" for one in made.findings), "1.02 is no number of ranks"


@pytest.mark.parametrize("broadcast", [1, 0])
def test_experts_that_a_broadcast_has_overwritten(proof, broadcast):
    layouts = ("ranks=1 broadcast=0", f"ranks=2 broadcast={broadcast}")
    made = proof(EXPERTS, layouts, "broadcast={broadcast}")
    assert made.equal == (not broadcast), str(made)
    if broadcast:
        assert [one.cause for one in made.findings] == ["initial-parameters"], str(made)
        assert set(made.findings[0].parameters) == {f"experts.{n}.{of}" for n in (2, 3) for of in ("weight", "bias")}


@pytest.mark.parametrize(("words", "told"), [("clear=1 each=0", "cleared"), ("clear=0 each=1", "× 2")])
def test_what_is_done_between_micro_batches(proof, words, told):
    layouts = ("ranks=1 accumulate=2 clear=0 each=0", f"ranks=2 accumulate=2 {words}")
    made = proof(MICRO, layouts, "clear={clear}", "each={each}")
    assert [one.cause for one in made.findings] == ["summed-again"], str(made)
    assert told in made.findings[0].why


def test_all_parameters_of_a_cause_and_no_factor_of_one_number(proof):
    made = proof(TWO)
    by_cause = {one.cause: one for one in made.findings}
    assert by_cause["not-summed"].parameters == ("bias",)
    assert all(one.factor is None for one in made.findings if one.parameters == ("optimizer.1.0",))
    assert not any(one.cause in ("sum-for-mean", "mean-for-sum") for one in made.findings), str(made)
    assert sum(len(one.parameters) for one in made.findings) == len(
        {name for one in made.findings for name in one.parameters}
    ), "each once"


def test_the_manual_and_double_are_named_beside_the_verdict(proof, capsys):
    from pardemo import cli

    made = proof(MIXED, ("ranks=1 times=1.0", "ranks=2 times=1.5"), "times={times}", double=False)
    script = made.layouts[0].layout.line[0]
    line = ["prove", "--layout", "ranks=1 times=1.0", "--layout", "ranks=2 times=2.0", "--", script, "times={times}"]
    assert cli.main(line) == 1
    printed = capsys.readouterr()
    assert "docs/prove.md" in printed.err
    assert "--double" in printed.err
    assert "docs/prove.md" not in printed.out


def test_what_cannot_be_proven_is_refused_without_torch(tmp_path):
    import subprocess

    check = "import sys; from pardemo.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    layouts = ["--layout", "ranks=1", "--layout", "ranks=2"]
    for words in ([*layouts, "--", "nothing.py"], ["--layout", "two", "--", "x.py"], ["nothing.toml"]):
        run = subprocess.run(
            [sys.executable, "-c", check, "prove", *words], cwd=tmp_path, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        assert run.stderr.count("\n") == 1
    assert torch.__version__, "which this process has"
