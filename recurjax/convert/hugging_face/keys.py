"""A config.json read key by key: each is understood, known to be harmless, or wrong."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from recurjax.errors import UserError, first_few
from recurjax.files.json_files import read_json_object

HARMLESS = {
    # What the weights are stored as, who wrote them, how to sample or initialise.
    *("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"),
    *("initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("unk_token_id", "tokenizer_class", "is_decoder", "is_llama_config", "auto_map"),
    *("_attn_implementation", "transformers.js_config", "_commit_hash", "license"),
    # Without effect outside training; recurjax trains without dropout.
    *("attention_dropout", "hidden_dropout", "classifier_dropout"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout"),
    # The same function in slices, or in another order.
    *("pretraining_tp", "reorder_and_upcast_attn"),
    # Of heads that classify; as many as n_positions; the default of layer_types.
    *("summary_type", "summary_use_proj", "summary_activation"),
    *("summary_proj_to_labels", "n_ctx", "_sliding_window_pattern"),
}
"""Keys that nearly every file has and that do not change the function."""
READ_OVER = {
    # What transformers hands back besides logits.
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("return_dict", "use_return_dict", "return_dict_in_generate", "problem_type"),
    *("id2label", "label2id", "finetuning_task", "task_specific_params", "prefix"),
    # Where the model was trained, and how attention was computed.
    *("gradient_checkpointing", "model_max_length", "use_bfloat16", "torchscript"),
    *("chunk_size_feed_forward", "tf_legacy_loss", "neftune_noise_alpha"),
    *("_flash_attn_2_enabled", "_attn_implementation_autoset", "use_flash_attn"),
    *("_unsloth_version", "pruned_heads"),
    # How to generate, which older files keep here.
    *("max_length", "min_length", "max_new_tokens", "min_new_tokens", "do_sample"),
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff"),
    *("eta_cutoff", "repetition_penalty", "encoder_repetition_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
    *("force_words_ids", "forced_bos_token_id", "forced_eos_token_id"),
    *("decoder_start_token_id", "sep_token_id", "suppress_tokens", "length_penalty"),
    *("begin_suppress_tokens", "num_beams", "num_beam_groups", "diversity_penalty"),
    *("num_return_sequences", "early_stopping", "exponential_decay_length_penalty"),
    *("remove_invalid_values", "renormalize_logits", "guidance_scale"),
    *("cache_implementation", "stop_strings", "max_time"),
}
"""Keys of trainers and of older files that do not change the function either."""
READ_OVER_PREFIXES = ("unsloth_",)
NEUTRAL = {
    "is_encoder_decoder": False,
    "tie_encoder_decoder": False,
    "add_cross_attention": False,
    "quantization_config": None,
    "sliding_window": None,
}
"""Keys that change nothing at one value; at another the model is another one."""


class Keys:
    """Hands out the keys of a config.json and collects what is wrong with them."""

    def __init__(
        self, values: dict[str, Any], *, where: str, ignored: Collection[str] = ()
    ):
        """Begins with all keys.

        Args:
          values: the contents of the file.
          where: what to call the file in messages.
          ignored: keys that are left out, on the user's word.
        """
        self._where = where
        self._wrong: list[str] = []
        self.read_over = sorted(
            key
            for key in values
            if key in READ_OVER or key in ignored or key.startswith(READ_OVER_PREFIXES)
        )
        # Gone before anything is read, so that what is left over is what nobody knows.
        gone = HARMLESS.union(self.read_over)
        self._values = {key: value for key, value in values.items() if key not in gone}

    def has(self, key: str) -> bool:
        """Whether the file states a key that was not taken yet."""
        return key in self._values

    def size(
        self, key: str, default: int | None = None, *, most: int = 2**31 - 1
    ) -> int:
        """Reads a positive integer up to `most`; null counts as absent."""
        # Old files write null where a key is not used.
        value = self._values.pop(key, None)
        value = default if value is None else value
        if value is None:
            self._wrong.append(f"{key} is missing")
            return 1
        # `type` and not isinstance: true would be a 1.
        if type(value) is not int or not 1 <= value <= most:
            got = repr(value)[:40]
            self._wrong.append(f"{key} must be an integer from 1 to {most}, got {got}")
            return 1
        return value

    def layers(self, key: str, default: int | None = None) -> int:
        """Reads a number of layers, which bounds the length of lists."""
        return self.size(key, default, most=100_000)

    def optional_size(self, key: str, default: int | None) -> int | None:
        """Reads a positive integer or null."""
        if self._values.get(key, default) is not None:
            return self.size(key, default)
        self._values.pop(key, None)
        return None

    def number(self, key: str, default: float | None = None) -> float:
        """Reads a number; without a default it must be there."""
        value = self._values.pop(key, default)
        if type(value) not in (int, float):
            wrong = (
                "is missing" if value is None else f"must be a number, got {value!r}"
            )
            self._wrong.append(f"{key} {wrong}")
            return 1.0 if default is None else default
        return float(value)

    def optional(self, key: str, default: float | None) -> float | None:
        """Reads a number or null."""
        if self._values.get(key, default) is not None:
            return self.number(key, default)
        self._values.pop(key, None)
        return None

    def numbers(self, key: str) -> tuple[float, ...]:
        """Reads a list of numbers."""
        values = self._values.pop(key, None)
        is_list = isinstance(values, list)
        if not is_list or any(type(value) not in (int, float) for value in values):
            self._wrong.append(f"{key} must be a list of numbers, got {values!r:.60}")
            return ()
        return tuple(map(float, values))

    def flag(self, key: str, default: bool) -> bool:
        """Reads true or false."""
        value = self._values.pop(key, default)
        if type(value) is not bool:
            self._wrong.append(f"{key} must be true or false, got {value!r}")
            return default
        return value

    def word(self, key: str, choices: dict[str, Any], default: str) -> Any:
        """Reads one of a few words and returns its value."""
        value = self._values.pop(key, None)
        value = default if value is None else value
        if not isinstance(value, str) or value not in choices:
            self._wrong.append(f"{key} {value!r} is not supported ({_or(choices)})")
            value = default
        return choices[value]

    def only(self, key: str, *allowed: Any) -> None:
        """Reads a key that must be absent or have one of these values."""
        # Absent means the first value, which is what the architecture does by itself.
        value = self._values.pop(key, allowed[0])
        if value not in allowed:
            self._wrong.append(f"{key} {value!r} is not supported, only {allowed[0]!r}")

    def any(self, key: str) -> Any:
        """Reads a key whatever its value; None where it is absent."""
        return self._values.pop(key, None)

    def wrong(self, text: str) -> None:
        """Notes what else is wrong."""
        self._wrong.append(text)

    def problems(self) -> list[str]:
        """Ends the reading; returns what was wrong, unknown keys too."""
        for key, value in sorted(self._values.items()):
            # No reader took it: it may change the function, unless it is switched off.
            if value is None or (key in NEUTRAL and value == NEUTRAL[key]):
                self.read_over.append(key)
            else:
                self._wrong.append(f"{key} {value!r:.200} is unknown")
        return self._wrong

    def finish(self) -> None:
        """Ends the reading.

        Raises:
          UserError: something was wrong, or keys are left that nobody understands.
        """
        if problems := self.problems():
            raise UserError(
                f"{self._where}: {first_few(problems)} (if a key does not change "
                "the model, --ignore-key NAME ignores it)"
            )


def read_keys(file: Path) -> dict[str, Any]:
    """Reads a checkpoint's config.json.

    Raises:
      UserError: there is no such file, or it holds something else.
    """
    if not file.is_file():
        raise UserError(
            f"{file.parent} is not a checkpoint directory: it has no "
            f"{file.name}; name the folder that has it"
        )
    return read_json_object(file, "the model's config")


def _or(choices: dict[str, Any]) -> str:
    return "known: " + ", ".join(choices)
