"""A fine-tune with Transformers' Trainer and PEFT, as it was planned.

``--data`` is a file of JSON lines, or one JSON array. Each row has a ``text``; or a ``prompt`` and a ``completion``, of
which the completion alone is learned; or ``instruction``, ``output`` and perhaps ``input``, as Alpaca's rows; or
``messages`` or ShareGPT's ``conversations`` for the tokenizer's chat template, all of which are learned.
``training_arguments.yaml``, beside this script, has all that Transformers calls TrainingArguments. Before its first
step a run makes sure that it is cut over as many ranks, and by the same engine, as was planned: a launcher that was
started in another way trains plain copies of the model, and says nothing.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

# --- the plan
MODEL: str | None = None
SEQUENCE = 1024
DTYPE = torch.bfloat16
LORA: dict[str, Any] | None = None
ENGINE, RANKS = "zero-2", 8
# --- end of the plan


class Samples(Dataset):
    """The file's lines as tokens, each made when it is asked for; labels of -100 are not learned."""

    def __init__(self, path: str, tokenizer: Any):
        self.tokenizer = tokenizer
        self.rows = _rows(path)
        if not self.rows:
            raise SystemExit(f"{path} has no samples")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row, end = self.rows[index], [self.tokenizer.eos_token_id]
        prompt: list[int] = []
        if "messages" in row:
            text = self.tokenizer.apply_chat_template(row["messages"], tokenize=False)
            learned = self.tokenizer(text, add_special_tokens=False).input_ids
        elif "text" in row:
            learned = self._begun(row["text"]) + end
        else:
            prompt = self._begun(row["prompt"])
            learned = self.tokenizer(row["completion"], add_special_tokens=False).input_ids + end
        learned = learned[:SEQUENCE]
        prompt = prompt[max(0, len(prompt) + len(learned) - SEQUENCE) :]  # of what is too long the prompt's begin goes
        ids = prompt + learned
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100] * len(prompt) + learned}

    def _begun(self, text: str) -> list[int]:
        """A text's tokens from the one that begins a text; some tokenizers end it as well."""
        ids = self.tokenizer(text).input_ids
        return ids[:-1] if ids[-1:] == [self.tokenizer.eos_token_id] else ids


def _rows(path: str) -> list[dict[str, Any]]:
    text = Path(path).read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        return [_row(row, f"{path}, row {number}") for number, row in enumerate(_read(text, path), 1)]
    lines = enumerate(text.split("\n"), 1)  # a text may hold other ends of lines
    return [_row(_read(line, origin := f"{path}, line {n}"), origin) for n, line in lines if line.strip()]


def _read(text: str, origin: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise SystemExit(f"{origin} is not JSON") from None


def _row(row: Any, origin: str) -> dict[str, Any]:
    if isinstance(row, dict) and {"instruction", "output"} <= row.keys():
        asked = "\n".join(filter(None, (row["instruction"], row.get("input"))))
        row = {"prompt": asked, "completion": row["output"]}
    answer = next((key for key in ("completion", "response", "chosen") if isinstance(row, dict) and key in row), None)
    if answer and "prompt" in row:
        row = {"prompt": row["prompt"], "completion": row[answer]}
        if isinstance(row["prompt"], list) and isinstance(row["completion"], list):
            row = {"messages": [*row["prompt"], *row["completion"]]}
    if isinstance(row, dict) and "conversations" in row:
        roles = {"human": "user", "gpt": "assistant", "bot": "assistant"}
        try:
            turns = [{"role": roles.get(t["from"], t["from"]), "content": t["value"]} for t in row["conversations"]]
        except (KeyError, TypeError):
            raise SystemExit(f"{origin}: a turn of conversations needs from and value") from None
        row = {"messages": turns}
    if not (isinstance(row, dict) and ("text" in row or "messages" in row or {"prompt", "completion"} <= row.keys())):
        raise SystemExit(
            f"{origin} has no text, no messages, no prompt with a completion, and no instruction with an output"
        )
    return row


class AsPlanned(TrainerCallback):
    """Ends the run before its first step where the model is not cut as it was planned."""

    trainer: Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        running = what_runs(self.trainer.model_wrapped, self.trainer.accelerator.num_processes)
        if running != (ENGINE, RANKS):
            raise RuntimeError(f"planned: {ENGINE} on {RANKS} ranks; what was started: {running[0]} on {running[1]}")
        if state.is_world_process_zero:
            print(f"{ENGINE} on {RANKS} ranks, as planned", flush=True)


def what_runs(model: Any, processes: int) -> tuple[str, int]:
    """The engine that a model is in, and over how many ranks: asked of what was made, not of what was configured."""
    if hasattr(model, "zero_optimization_stage"):
        return f"zero-{model.zero_optimization_stage()}", model.dp_world_size
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if trained and all(hasattr(parameter, "placements") for parameter in trained):  # FSDP2's DTensors
        return "fsdp2", trained[0].device_mesh.size()
    return type(model).__name__, processes


def arguments_of(options: argparse.Namespace) -> TrainingArguments:
    """``training_arguments.yaml`` and what ``--set`` changes of it; without a GPU, to be tried out, on the CPU."""
    settings = yaml.safe_load(Path(__file__).with_name("training_arguments.yaml").read_text(encoding="utf-8"))
    settings |= {key: yaml.safe_load(value) for key, _, value in (text.partition("=") for text in options.set)}
    if isinstance(settings.get("deepspeed"), str):
        settings["deepspeed"] = str(Path(__file__).with_name(settings["deepspeed"]))
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        settings |= {"use_cpu": True, "ddp_backend": "gloo"}
    [arguments] = HfArgumentParser(TrainingArguments).parse_dict(settings | {"output_dir": options.output})
    if on_cpu and arguments.deepspeed:
        import deepspeed

        deepspeed.init_distributed("gloo")  # left out there by Transformers, and stage 3 needs it to read the model
    return arguments


def model_of(options: argparse.Namespace) -> nn.Module:
    """The model with its new adapter. Under stage 3 Transformers cuts it while it reads it."""
    further: dict[str, Any] = {}
    if options.four_bit:
        from transformers import BitsAndBytesConfig

        further["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=DTYPE, bnb_4bit_quant_storage=DTYPE,  # else they could not be cut
        )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=DTYPE, local_files_only=options.offline, use_cache=False, **further
    )
    if LORA is None:
        return model
    from peft import LoraConfig, get_peft_model

    # DeepSpeed keeps fp32 copies itself, and wants one type; FSDP2's optimizer has the adapter's own, in fp32
    return get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", **LORA), autocast_adapter_dtype=not ENGINE.startswith("zero")
    )


def main(words: Sequence[str] | None = None) -> Trainer:
    """Trains, and writes the adapter or the model into the output folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a file of JSON lines")
    parser.add_argument(
        "--model", default=MODEL, required=MODEL is None, help=f"a folder, or a name on Hugging Face ({MODEL})"
    )
    parser.add_argument("--output", default="output", help="a folder (output)")
    parser.add_argument("--offline", action="store_true", help="read the model from this machine alone")
    parser.add_argument("--four-bit", action="store_true", help="QLoRA, which needs bitsandbytes")
    parser.add_argument(
        "--resume", action="store_true", help="go on from your own last checkpoint in the output folder"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of TrainingArguments")
    options = parser.parse_args(words)
    if options.four_bit and LORA is None:
        parser.error("--four-bit: weights of 4 bits are not trained; plan LoRA")
    if (started := int(os.environ.get("WORLD_SIZE", "1"))) != RANKS:
        parser.error(f"planned for {RANKS} ranks, started as {started}: see launch.sh")
    arguments = arguments_of(options)  # first: it joins the ranks, and tells Transformers of DeepSpeed's stage
    set_seed(arguments.seed)  # the new adapter is drawn alike on all ranks
    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=options.offline)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    check = AsPlanned()
    check.trainer = trainer = Trainer(
        model=model_of(options),
        args=arguments,
        train_dataset=Samples(options.data, tokenizer),
        data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8),
        processing_class=tokenizer,
        callbacks=[check],
    )
    trainer.train(resume_from_checkpoint=options.resume or None)
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
