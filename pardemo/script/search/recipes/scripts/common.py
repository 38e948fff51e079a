"""Has what the scripts share: options, small models of transformers, PEFT's methods on them, steps of training."""

import argparse
import tempfile

import torch
import torch.distributed as dist
import transformers
from torch import nn

#: Of each small model of transformers; each kind of model takes those that it has.
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "attention_dropout": 0.0, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "use_cache": False,
}  # fmt: skip


def options(**defaults):
    """Reads an option for each default, of its type; ``way`` and ``ddp`` are words with a + between them: a set."""
    parser = argparse.ArgumentParser()
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    for name in {"way", "ddp"} & defaults.keys():
        setattr(args, name, set(getattr(args, name).split("+")))
    return args


def start():
    """Starts the process group; returns the number of ranks and this one's."""
    dist.init_process_group("gloo")
    return dist.get_world_size(), dist.get_rank()


def integers(step, high, *shape, low=0):
    """Whole numbers that depend on the step alone."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(step))


def show(step, loss):
    """Prints a step's loss on rank 0."""
    if dist.get_rank() == 0:
        print(f"step {step} loss {float(loss):.6f}", flush=True)


def update(model, optimizer, clip=0.0):
    """Clips the gradients where a limit is given, steps, and drops them."""
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


def small(model="Llama", **sizes):
    """A small random language model of transformers."""
    kind = getattr(transformers, f"{model}Config")
    known = {*kind.__dataclass_fields__, *kind.attribute_map}
    config = kind(**{name: value for name, value in {**SIZES, **sizes}.items() if name in known})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


def loaded(model, **how):
    """The same model as ``from_pretrained`` loads it: transformers cuts it there. Starts the process group."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        start()  # only now: else rank 0 alone saves
        return type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **how).train()


def with_peft(model, method):
    """The model with one of PEFT's methods, whose parameters are random: zeros have no gradient, or give none."""
    import peft

    some = ["q_proj", "o_proj", "down_proj"]
    kind, settings = {
        "lora": ("Lora", {"target_modules": some}),
        "all": ("Lora", {"target_modules": "all-linear", "use_rslora": True, "lora_bias": True}),
        "embed": ("Lora", {"target_modules": ["embed_tokens", "q_proj", "lm_head"]}),
        "dora": ("Lora", {"target_modules": [*some, "embed_tokens"], "use_dora": True}),
        "saved": ("Lora", {"target_modules": some, "modules_to_save": ["lm_head", "norm"]}),
        "tied": ("Lora", {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}),
        "tokens": ("Lora", {"target_modules": some, "trainable_token_indices": [1, 5, 7]}),
        "parameters": ("Lora", {"target_parameters": ["q_proj.weight"], "target_modules": ["o_proj"]}),
        "ia3": ("IA3", {"target_modules": [*some], "feedforward_modules": ["down_proj"]}),
        "vera": ("Vera", {"r": 4, "target_modules": ["q_proj", "o_proj"]}),
        "oft": ("OFT", {"r": 0, "oft_block_size": 8, "target_modules": some}),
    }[method]
    settings = {"task_type": "CAUSAL_LM"} | ({"r": 4} if kind == "Lora" else {}) | settings
    model = peft.get_peft_model(model, getattr(peft, f"{kind}Config")(**settings))
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        parameter.data += 0.05 * torch.randn(parameter.shape)
    return model


def labelled_samples(vocabulary):
    """24 samples with different numbers of labels, by which they weigh."""
    data = []
    for number in range(24):
        tokens = torch.randint(vocabulary, (9,))
        labels = tokens.clone()
        labels[: number % 7] = -100
        data.append({"input_ids": tokens, "labels": labels})
    return data


def train_with_trainer(model, args, data, **more):
    """Three steps of transformers' Trainer, which reads the data in their order and writes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=args.batch, gradient_accumulation_steps=args.accumulate, max_steps=3,
            max_grad_norm=args.clip, learning_rate=0.01, optim="sgd", report_to="none", save_strategy="no",
            train_sampling_strategy="sequential", disable_tqdm=True, label_smoothing_factor=args.smoothing, **more,
        )  # fmt: skip
        transformers.Trainer(model, arguments, train_dataset=data).train()
