"""Baichuan2 for Transformers 5: 7B (RoPE) and 13B (ALiBi), with the official names of modules and parameters."""

import torch
from torch import nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from pardemo import compat
from pardemo.baichuan2.attention import Pattern, alibi_slopes, rotate, rotation
from pardemo.baichuan2.configuration import Baichuan2Config
from pardemo.baichuan2.head import NormHead, cross_entropy, label_loss


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε), in fp32, then in the weight's type, times the weight [h]."""

    def __init__(self, hidden: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(self.weight.dtype)


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Multi-head attention; ``W_pack`` [3h, h] is q, k and v one below the other."""

    def __init__(self, config: Baichuan2Config, layer: int):
        super().__init__()
        self.config, self.heads, self.layer = config, config.num_attention_heads, layer
        self.W_pack = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        pattern: Pattern,
        angles: tuple[torch.Tensor, torch.Tensor] | None,
        cache: Cache | None,
        weigh: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Its output [b, s, h], and the attention weights [b, heads, s, keys] where they are wanted (``weigh``)."""
        parts = self.W_pack(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [3, b, heads, s, d]
        q, k, v = parts.unbind(0)
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        how, weights = compat.attention_of(self.config), None
        if weigh or how == "eager":
            out, weights = pattern.weigh(q, k, v)
        else:
            flex = how == "flex_attention" or q.is_cuda  # on a GPU no mask is ever made
            out = pattern.attend(q, k, v, flex, blocks=self.config.attention == "blocks")
        return self.o_proj(out.transpose(1, 2).flatten(2)), weights


class BaichuanLayer(GradientCheckpointingLayer):
    """A decoder layer: attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: Baichuan2Config, layer: int):
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        pattern: Pattern,
        angles: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: Cache | None = None,
        weigh: bool = False,
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), pattern, angles, cache, weigh)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class Baichuan2PreTrainedModel(PreTrainedModel):
    config_class = Baichuan2Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["BaichuanLayer"]  # noqa: RUF012, a name of Transformers
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_record_outputs = {"hidden_states": BaichuanLayer, "attentions": Attention}  # noqa: RUF012


class Baichuan2Model(Baichuan2PreTrainedModel):
    """Token numbers to the last hidden states."""

    def __init__(self, config: Baichuan2Config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(BaichuanLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        cache: Cache | None = None,
        **_,
    ) -> BaseModelOutputWithPast:
        """Hidden states [b, s, h]; with ``output_hidden_states`` and ``output_attentions`` those of all layers too.

        Args:
            input_ids: [b, s]; or ``inputs_embeds`` [b, s, h].
            attention_mask: [b, keys], 0 where padding is, or whole as [b, 1 or heads, s, keys]. Leave it out when only
                the right end is padded: causal attention hides that anyway, and one bias then serves the whole batch.
            position_ids: [b, s]; where they begin again at 0 another packed sample begins, which sees nothing before.
            cache: the name of ``past_key_values`` since Transformers 5.24.
            output_attentions: the weights [b, heads, s, keys] of every layer; no fused kernel makes them, so that
                attention is then computed step by step, whatever its implementation.

        Raises:
            ValueError: both of ``input_ids`` and ``inputs_embeds``, or none.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds has to be given")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        past, keys = 0, x.shape[1]
        if cache is not None:
            past, keys = int(cache.get_seq_length()), cache.get_mask_sizes(x.shape[1], 0)[0]
        segments = None
        if position_ids is not None and attention_mask is None and not past and keys == x.shape[1]:
            segments = position_ids.eq(0).cumsum(1)
        pattern = Pattern(self._slopes(x.device), x.shape[1], keys, x.device, attention_mask, segments, past)
        angles = None
        if self.config.position_embedding == "rope":
            if position_ids is None:
                position_ids = torch.arange(past, past + x.shape[1], device=x.device)[None]
            angles = rotation(position_ids, self.config.hidden_size // self.config.num_attention_heads)
        for layer in self.layers:
            x = layer(x, pattern, angles, cache=cache, weigh=bool(output_attentions))
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), **{compat.cache_name(): cache})

    def _slopes(self, device: torch.device) -> torch.Tensor | None:
        if self.config.position_embedding == "rope":
            return None
        return torch.tensor(alibi_slopes(self.config.num_attention_heads), device=device)


class Baichuan2ForCausalLM(Baichuan2PreTrainedModel, GenerationMixin):
    """Baichuan2 with its head. With ``labels`` it returns the loss; see :func:`pardemo.baichuan2.head.label_loss`.

    Resizing the vocabulary keeps the head a NormHead: a new row has the length 1 there, like all others, whatever it is
    initialised with.
    """

    _tied_weights_keys = None

    def __init__(self, config: Baichuan2Config):
        super().__init__(config)
        self.model = Baichuan2Model(config)
        self.lm_head: nn.Module = NormHead(config.hidden_size, config.vocab_size, bool(config.normalize_head))
        self.post_init()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Sets the layer that computes the logits; ``config.normalize_head`` then says whether it is a NormHead."""
        self.lm_head = new_embeddings
        self.config.normalize_head = getattr(new_embeddings, "normalize", False)

    def _get_resized_lm_head(self, old_lm_head: nn.Linear, *args, **kwargs) -> nn.Linear:
        resized = super()._get_resized_lm_head(old_lm_head, *args, **kwargs)
        if not isinstance(old_lm_head, NormHead):
            return resized
        old_lm_head.weight, old_lm_head.out_features = resized.weight, resized.out_features
        old_lm_head._is_hf_initialized = True  # type: ignore[assignment] # a later post_init leaves it as it is
        return old_lm_head

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Logits [b, s, v] without ``labels`` [b, s] (−100 where there is none); with them the loss alone.

        Where the configuration's ``loss_head`` is ``"full"``, both. ``output_hidden_states`` and ``output_attentions``
        as in :class:`Baichuan2Model`; no cache is made in training unless ``use_cache`` asks for it.
        """
        if use_cache is None and (self.training or labels is not None):
            use_cache = False
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        hidden, loss, logits = out.last_hidden_state, None, None
        if labels is None:
            logits = self.lm_head(slice_logits_to_keep(hidden, logits_to_keep))
        elif self.config.loss_head == "full":
            logits = self.lm_head(hidden)
            loss = cross_entropy(logits[:, :-1], labels[:, 1:], num_items_in_batch)
        else:
            loss = label_loss(self.lm_head, hidden, labels, num_items_in_batch)
        name = compat.cache_name()
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{name: out.get(name)},
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )
