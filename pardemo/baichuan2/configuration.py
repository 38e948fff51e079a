"""Baichuan2's configuration: the official ``config.json``, read without its remote code."""

from typing import Literal

from transformers import PreTrainedConfig

from pardemo import argument_checks

#: Baichuan 1 had 64,000; its head does not normalise.
BAICHUAN2_VOCABULARY = 125_696


class Baichuan2Config(PreTrainedConfig):
    """The settings of the official ``config.json`` of Baichuan2-7B and -13B, and those that it leaves to the code.

    Args:
        position_embedding: ``"rope"`` (7B) or ``"alibi"`` (13B). The official files do not say; where it is left out,
            a hidden size of 4096 means the 7B model, as vLLM decides it.
        normalize_head: divide the head's rows by their norm (NormHead). Left out: yes, but for Baichuan 1's vocabulary.
        loss_head: with ``labels``, compute logits ``"labels"``: only where there is a label; ``"full"``: everywhere.
        attention: on a CPU, ``"whole"``: one call of torch's kernel for all queries, as Transformers' models do it;
            ``"blocks"``: a call for each block of queries, with the keys that it sees alone, in fp32.
        z_loss_weight: 0, as in both official models: the loss has no such term here.

    The others as in Llama. ``model_max_length`` is the context, 4096; other libraries read and set it as
    ``max_position_embeddings``.

    Raises:
        ValueError: heads that do not divide the hidden size, or a value that is none of the above.
    """

    model_type = "baichuan"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012, a name of Transformers
    attribute_map = {"max_position_embeddings": "model_max_length"}  # noqa: RUF012

    vocab_size: int = BAICHUAN2_VOCABULARY
    hidden_size: int = 5120
    intermediate_size: int = 13696
    num_hidden_layers: int = 40
    num_attention_heads: int = 40
    hidden_act: str = "silu"
    model_max_length: int = 4096
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    z_loss_weight: float = 0.0
    position_embedding: Literal["rope", "alibi"] | None = None
    normalize_head: bool | None = None
    loss_head: Literal["labels", "full"] = "labels"
    attention: Literal["whole", "blocks"] = "whole"

    def __post_init__(self, **kwargs):
        if self.position_embedding is None:
            self.position_embedding = "rope" if self.hidden_size == 4096 else "alibi"
        if self.normalize_head is None:
            self.normalize_head = self.vocab_size != 64_000
        kwargs.pop("auto_map", None)  # names of code in the model's folder, which is never run
        kwargs.pop("gradient_checkpointing", None)  # the official 13B class makes a tuple of it, which is always true
        super().__post_init__(**kwargs)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "model_max_length"):  # fmt: skip
            argument_checks.whole_number(getattr(self, name), name)
        if not isinstance(self.rms_norm_eps, float) or not self.rms_norm_eps > 0:
            raise ValueError(f"rms_norm_eps must be a number above 0, not {self.rms_norm_eps!r}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} does not divide by {self.num_attention_heads} heads")
        for name, choices in (
            ("hidden_act", ("silu",)), ("position_embedding", ("rope", "alibi")), ("loss_head", ("labels", "full")),
            ("attention", ("whole", "blocks")), ("z_loss_weight", (0,)),
        ):  # fmt: skip
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {' or '.join(map(repr, choices))}, not {getattr(self, name)!r}")

    @classmethod
    def b13(cls, **changes) -> "Baichuan2Config":
        """Baichuan2-13B."""
        return cls(**changes)
