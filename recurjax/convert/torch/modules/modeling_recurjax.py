"""A recurjax model in transformers. The mathematics is in decoder_recurjax.py.

model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)

Pads may be anywhere in a row, left, right or between its tokens: they advance no state
and have no position, and a pad has the logits of the token before it.
"""

from typing import Any

import torch
from configuration_recurjax import RecurjaxConfig
from decoder_recurjax import Cache as DecoderCache
from decoder_recurjax import Decoder
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast


class RecurjaxCache(Cache):
    """The cache of the tokens that a model has read, for `generate`.

    A recurrent state cannot be taken back, so there is no `crop`. A copy of the cache
    (copy.deepcopy) continues from the same tokens as often as wanted.
    """

    is_compileable = False

    def __init__(self, decoder: DecoderCache):
        super().__init__(layers=[])
        self.decoder = decoder

    def __len__(self) -> int:
        return len(self.decoder.states)

    @property
    def is_initialized(self) -> bool:
        return self.decoder.position is not None

    @property
    def max_batch_size(self) -> int:
        return 0 if self.decoder.position is None else len(self.decoder.position)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the columns that were read, pads among them."""
        return self.decoder.columns

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Returns -1: the cache grows."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.decoder.take(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.decoder.take(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.decoder.position is not None:
            rows = torch.arange(self.max_batch_size).repeat_interleave(repeats)
            self.decoder.take(rows.to(self.decoder.position.device))

    def reset(self) -> None:
        self.decoder.reset()

    def crop(self, max_length: int) -> None:
        raise NotImplementedError(
            "a recurrent state cannot be cropped to earlier tokens: copy the "
            "cache before them (copy.deepcopy) and continue from the copy"
        )


class RecurjaxForCausalLM(PreTrainedModel, GenerationMixin):
    """The exported decoder, with its loss, its cache and `generate`."""

    config_class = RecurjaxConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    # Assisted generation takes tokens back, which a recurrent state cannot do.
    _is_stateful = True
    _no_split_modules = ["Decoder"]

    def __init__(self, config: RecurjaxConfig):
        super().__init__(config)
        self.model = Decoder(config.model)
        self.post_init()

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: torch.nn.Module) -> None:
        self.model.embedding = value

    def get_output_embeddings(self) -> torch.nn.Module | None:
        """Returns the head; None: it is the embedding itself."""
        return self.model.head

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        raise NotImplementedError(
            "the vocabulary of an exported model is fixed: export a model that has a "
            "larger one"
        )

    def new_cache(self, capacity: int = 0) -> RecurjaxCache:
        """Returns an empty cache.

        Args:
          capacity: columns that it has room for from the start; beyond them it grows,
            which a compiled step has to be compiled for again.
        """
        return RecurjaxCache(self.model.new_cache(capacity))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RecurjaxCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Returns logits [B, T, V] in at least float32, and what else is wanted.

        Args:
          input_ids: [B, T]; with a cache, the next T columns of every row.
          attention_mask: [B, T], or with the columns of the cache before them; 0 at
            pads; None: there are none.
          past_key_values: from `new_cache` or an earlier output; it is moved on.
          labels: [B, T]; the loss is of each label and the column before it, -100 is
            left out.
          use_cache: return a cache; None: as the config says, but not while gradients
            are recorded.
          output_hidden_states: return the embedding, each layer's output and the last
            one's after the final norm.
          logits_to_keep: columns that logits are wanted of, the last ones; 0: all.
          kwargs: what the loss takes, such as `num_items_in_batch`.
        """
        _refuse(kwargs, attention_mask, past_key_values)
        if input_ids is None:
            raise ValueError("a recurjax model needs input_ids, got none")
        if use_cache is None:
            use_cache = self.config.use_cache and not torch.is_grad_enabled()
        if past_key_values is None and use_cache:
            past_key_values = self.new_cache()
        states: list[Tensor] | None = (
            [] if self._wants_states(output_hidden_states) else None
        )
        logits = self.model(
            input_ids,
            None if past_key_values is None else past_key_values.decoder,
            states,
            mask=attention_mask,
            last=logits_to_keep,
        )
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                **kwargs,
            )
        if states is not None:
            states[-1] = self.model.final_norm(states[-1])
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values,
            hidden_states=None if states is None else tuple(states),
        )
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Returns the arguments of `forward` for the columns that are not read yet."""
        _refuse({"inputs_embeds": inputs_embeds}, None, None)
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        # Positions come from the cache and the mask, not from what `generate` counts.
        return {
            name: value
            for name, value in inputs.items()
            if name not in ("cache_position", "position_ids")
        }

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} "
                "is not supported, because a recurjax model has its own cache: "
                "leave it out"
            )
        if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = self.new_cache()

    def _wants_states(self, option: bool | None) -> bool:
        return self.config.output_hidden_states if option is None else option


_UNSUPPORTED = {
    "inputs_embeds": "the model looks values up by ids: pass input_ids",
    "position_ids": "attention_mask defines the positions: leave it out",
    "output_attentions": "attention weights are not returned: leave it out",
    "token_type_ids": "the model has no token types: leave it out",
}


def _refuse(kwargs: dict[str, Any], mask: Tensor | None, cache: Any) -> None:
    """Raises ValueError for an argument that would be ignored."""
    for name, reason in _UNSUPPORTED.items():
        value = kwargs.pop(name, None)
        if value is not None and value is not False:
            raise ValueError(f"{name} is not supported: {reason}")
    if mask is not None and mask.dim() != 2:
        raise ValueError(
            "attention_mask must be [B, T] with 0 at pads, got the shape "
            f"{tuple(mask.shape)}"
        )
    if cache is not None and not isinstance(cache, RecurjaxCache):
        raise ValueError(
            "past_key_values must be this model's own cache, got a "
            f"{type(cache).__name__}: leave it out or use model.new_cache()"
        )
