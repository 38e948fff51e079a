"""A training script in the forms that people write: ``--form``, over ``--wrapper``, in ``--precision``. It is right.

With ``--fault`` one parameter's gradient is not averaged over the ranks: what every form has to be found in.
"""

import argparse
import contextlib
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, ROWS, STEPS = 24, 16, 8, 3
PADDED = ("padded", "padded-left")


class Scaled(torch.autograd.Function):
    """A linear layer in fp8, each tensor with a scale of its own: e4m3 forward, e5m2 for gradients. […, i] → […, o]"""

    @staticmethod
    def cast(x, dtype):
        scale = x.abs().max() / torch.finfo(dtype).max + 1e-30
        return (x / scale).to(dtype).float() * scale

    @staticmethod
    def forward(ctx, x, weight):
        x, weight = (Scaled.cast(one, torch.float8_e4m3fn) for one in (x, weight))
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        gradient = Scaled.cast(gradient, torch.float8_e5m2)
        return gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2)


class Fp8Linear(nn.Linear):
    def forward(self, x):
        return Scaled.apply(x, self.weight) + self.bias


class Model(nn.Module):
    """Tokens to logits, each by itself and with what came before it. [b, s] → [b, s, VOCAB]"""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def body(self, x):
        return self.norm(x + self.down(torch.tanh(self.up(x))))

    def forward(self, tokens):
        x = self.embed(tokens)
        if self.form.startswith("checkpointed") and torch.is_grad_enabled():
            x = checkpoint(self.body, x, use_reentrant=self.form.endswith("reentrant"))
        else:
            x = self.body(x)
        return self.head(x)


class Bare:
    """Parameters in no module, and functions of them."""

    def __init__(self):
        shapes = {"table": (VOCAB, WIDTH), "up": (WIDTH, WIDTH), "head": (VOCAB, WIDTH)}
        self.parts = {name: nn.Parameter(torch.randn(shape) / 4) for name, shape in shapes.items()}

    def parameters(self):
        return list(self.parts.values())

    def __call__(self, tokens):
        p = self.parts
        return F.linear(torch.tanh(F.linear(F.embedding(tokens, p["table"]), p["up"])), p["head"])


class Beside(nn.Module):
    """A module, and a head that the script multiplies with itself."""

    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        return torch.tanh(self.up(self.embed(tokens)))


def rows_of(step):
    """The rows of a step, of unlike lengths. Padding is 0, and no row has it."""
    drawn = torch.Generator().manual_seed(100 + step)
    lengths = torch.randint(4, 12, (ROWS,), generator=drawn).tolist()
    return [torch.randint(1, VOCAB, (length,), generator=drawn) for length in lengths]


def batch_of(rows, form):
    """Tokens and labels of a micro-batch, filled up to its longest row, or to 12; or all in one row."""
    if form == "packed":
        return torch.cat(rows)[None], torch.cat(rows)[None]
    longest = max(map(len, rows)) if form in PADDED else 12

    def filled(row, value):
        room = longest - len(row)
        return F.pad(row, (room, 0) if form == "padded-left" else (0, room), value=value)

    return torch.stack([filled(row, 0) for row in rows]), torch.stack([filled(row, -100) for row in rows])


class Training:
    def __init__(self, args):
        self.args, self.form = args, args.form
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.autocast = args.precision == "autocast"
        torch.manual_seed(0)
        self.nets, self.calls = self.models()
        self.parameters = [p for net in self.nets for p in net.parameters() if p.requires_grad]
        make = {"lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2)}
        make = make.get(self.form, lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.01))
        groups = [list(net.parameters()) for net in self.nets] if self.form == "two-optimizers" else [self.parameters]
        self.optimizers = [make(group) for group in groups]

    def models(self):
        """What is trained, and the function of tokens that the loss is of."""
        form = self.form
        if form == "bare":
            net = Bare()
            return [net], net
        if form == "beside":
            net, head = Beside(), nn.Parameter(torch.randn(VOCAB, WIDTH) / 4)
            self.head = head
            holder = nn.Module()
            holder.head = head
            wrapped = self.wrapped(net)
            return [wrapped, holder], lambda tokens: F.linear(wrapped(tokens), head)
        if form == "layers":
            layers = nn.ModuleList([nn.Embedding(VOCAB, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)),
                                    nn.Linear(WIDTH, VOCAB)])  # fmt: skip

            def walked(tokens):
                x = layers[0](tokens)
                for layer in layers[1:-1]:
                    x = torch.tanh(layer(x))
                return layers[-1](x)

            return [layers], walked
        if form == "two-optimizers":
            encoder, decoder = Beside(), nn.Linear(WIDTH, VOCAB)
            a, b = self.wrapped(encoder), self.wrapped(decoder)
            return [a, b], lambda tokens: b(a(tokens))
        net = Model(form)
        if form == "frozen":
            net.embed.requires_grad_(False)
        if form == "average":
            moving = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            self.average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=moving)
        if form in ("teacher", "reference-model"):
            torch.manual_seed(1)
            self.teacher = Model(form).requires_grad_(False).eval()
        return [wrapped := self.wrapped(net)], wrapped

    def wrapped(self, net):
        for part in net.modules() if self.args.precision == "fp8" else ():
            if type(part) is nn.Linear and part.out_features != VOCAB:
                part.__class__ = Fp8Linear
        if self.args.wrapper == "ddp":
            return DistributedDataParallel(net)
        if self.args.wrapper == "fsdp2":
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            short = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
            policy = MixedPrecisionPolicy(**short if self.args.precision == "policy" else {})
            return fully_shard(net, mp_policy=policy)
        return net

    def loss(self, tokens, labels):
        """The sum over this micro-batch's labels."""
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            logits = self.calls(tokens)
        made = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
        if self.form in ("teacher", "reference-model"):
            with torch.no_grad():
                theirs = self.teacher(tokens).log_softmax(-1)
            seen = labels != -100
            if self.form == "teacher":
                ours = logits.float().log_softmax(-1)
                made = made + F.kl_div(ours[seen], theirs[seen], log_target=True, reduction="sum")
            else:
                ours = logits.float().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])
                gain = ours - theirs.gather(-1, labels.clamp(min=0)[..., None])
                made = made - F.logsigmoid(gain[seen]).sum()
        return made

    def step(self, number):
        rows = rows_of(number)
        count = sum(map(len, rows))
        each = ROWS // self.ranks
        mine = rows[self.rank * each : (self.rank + 1) * each]
        size = each // self.args.accumulate
        batches = [batch_of(mine[at : at + size], self.form) for at in range(0, each, size)]

        def gradients():
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            total = 0.0
            averaged = self.args.wrapper in ("ddp", "fsdp2")
            for tokens, labels in batches:
                loss = self.loss(tokens, labels) * self.ranks / count
                loss.backward()
                total += float(loss.detach())
            left = self.by_hand() if averaged else self.parameters
            for place, parameter in enumerate(left):
                if parameter.grad is not None and not (self.args.fault and place == len(left) - 1 and self.ranks > 1):
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= self.ranks
            if self.args.fault and averaged and not left and self.ranks > 1:
                last = self.parameters[-1].grad
                (last.to_local() if hasattr(last, "to_local") else last).mul_(1.0 + 0.1 * self.rank)
            return torch.tensor(total)

        if self.form in ("closure", "lbfgs"):
            self.optimizers[0].step(gradients)
        elif self.form == "sharpness":  # SAM: a step up, gradients there, back, and the step
            gradients()
            with torch.no_grad():
                norm = sum(float(p.grad.square().sum()) for p in self.parameters) ** 0.5
                up = [p.grad * (0.05 / (norm + 1e-12)) for p in self.parameters]
                for parameter, by in zip(self.parameters, up, strict=True):
                    parameter.add_(by)
            gradients()
            with torch.no_grad():
                for parameter, by in zip(self.parameters, up, strict=True):
                    parameter.sub_(by)
            self.optimizers[0].step()
        else:
            gradients()
            for optimizer in self.optimizers:
                optimizer.step()
        self.after(rows)

    def by_hand(self):
        """What no wrapper averages."""
        return [self.head] if self.form == "beside" else []

    def after(self, rows):
        if self.form == "average":
            self.average.update_parameters(self.nets[0].module if hasattr(self.nets[0], "module") else self.nets[0])
            with torch.no_grad():
                self.average.eval()(batch_of(rows, self.form)[0])
        if self.form == "copy":
            copy.deepcopy(Model("plain"))(batch_of(rows, "plain")[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--form")
    parser.add_argument("--wrapper", default="ddp")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--fault", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    training = Training(args)
    for number in range(STEPS + 1):
        training.step(number)


if __name__ == "__main__":
    main()
