"""Rules that map keys of a config.json to our values, in both directions.

A rule takes its keys from a file and adds to the values, and writes the same keys from
values. What a family is, is a row of rules: `families.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from recurjax.convert.hugging_face.keys import Keys
from recurjax.convert.hugging_face.values import Values
from recurjax.layers.position import (
    DynamicScaling,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)


@runtime_checkable
class KeyRule(Protocol):
    """Some keys, in both directions."""

    def read(self, keys: Keys, values: Values) -> None:
        """Takes the rule's keys and adds what they say; earlier rules were read."""
        ...

    def write(self, values: Values) -> dict[str, Any]:
        """Returns the rule's keys for a model with these values."""
        ...


@dataclass(frozen=True, slots=True)
class Key:
    """A key that states one value, or several alike.

    Attributes:
      name: the key.
      value: names of our values, with spaces between.
      take: a method of `Keys`.
      default: where the key is missing, or a function of the values so far.
      sparse: left out where the default says the same: the class has no such key.
    """

    name: str
    value: str
    take: Callable[..., Any]
    default: Any = None
    sparse: bool = False

    def read(self, keys: Keys, values: Values) -> None:
        stated = self.take(keys, self.name, self._default(values))
        values |= dict.fromkeys(self.value.split(), stated)

    def write(self, values: Values) -> dict[str, Any]:
        stated = values[self.value.split()[0]]
        if self.sparse and stated == self._default(values):
            return {}
        return {self.name: stated}

    def _default(self, values: Values) -> Any:
        return self.default(values) if callable(self.default) else self.default


@dataclass(frozen=True, slots=True)
class Word:
    """A key that is one of a few words.

    Attributes:
      name, value: as in `Key`.
      words: what each stands for; of several for one thing the first is written.
      default: where the key is missing or null.
    """

    name: str
    value: str
    words: dict[str, Any]
    default: str

    def read(self, keys: Keys, values: Values) -> None:
        values[self.value] = keys.word(self.name, self.words, self.default)

    def write(self, values: Values) -> dict[str, Any]:
        stated = values[self.value]
        words = (word for word, meaning in self.words.items() if meaning == stated)
        return {self.name: next(words, self.default)}


@dataclass(frozen=True, slots=True)
class Only:
    """A key that must be missing or have one of these values, and is not written."""

    name: str
    allowed: tuple[Any, ...]

    def read(self, keys: Keys, values: Values) -> None:
        keys.only(self.name, *self.allowed)

    def write(self, values: Values) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class Unread:
    """A key that files of the family state and that transformers never reads."""

    name: str

    def read(self, keys: Keys, values: Values) -> None:
        keys.any(self.name)

    def write(self, values: Values) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class KeyHeads:
    """num_key_value_heads: null means as many as query heads.

    Attributes:
      default: default of transformers' class if the key is missing; None: as null.
    """

    default: int | None = None

    def read(self, keys: Keys, values: Values) -> None:
        heads, default = values["heads"], self.default
        # Where the class's number does not fit, transformers has no such model.
        if keys.has("num_key_value_heads") or default is None or heads % default:
            default = heads
        values["key_heads"] = keys.size("num_key_value_heads", default)

    def write(self, values: Values) -> dict[str, Any]:
        return {"num_key_value_heads": values["key_heads"]}


@dataclass(frozen=True, slots=True)
class HeadShare:
    """No key: heads divide the width."""

    def read(self, keys: Keys, values: Values) -> None:
        values["head_width"] = max(values["width"] // values["heads"], 1)

    def write(self, values: Values) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class QueryScale:
    """query_pre_attn_scalar: s in q k / sqrt(s); our scale None is 1/sqrt(E)."""

    default: float = 256.0

    def read(self, keys: Keys, values: Values) -> None:
        scalar = keys.number("query_pre_attn_scalar", self.default)
        if scalar <= 0:
            keys.wrong(f"query_pre_attn_scalar must be positive, got {scalar}")
            return
        own = scalar == values["head_width"]
        values["scale"] = None if own else scalar**-0.5

    def write(self, values: Values) -> dict[str, Any]:
        scale = values["scale"]
        scalar = values["head_width"] if scale is None else scale**-2
        # The rounding error of an integer.
        if math.isclose(scalar, round(scalar), rel_tol=1e-12):
            scalar = round(scalar)
        return {"query_pre_attn_scalar": scalar}


@dataclass(frozen=True, slots=True)
class Learned:
    """The number of learned positions.

    Attributes:
      name: its key.
    """

    name: str
    default: int

    def read(self, keys: Keys, values: Values) -> None:
        values["length"] = keys.size(self.name, self.default)
        values["position"] = LearnedPositions(length=values["length"])

    def write(self, values: Values) -> dict[str, Any]:
        return {self.name: values["length"]}


@dataclass(frozen=True, slots=True)
class Ropes:
    """Base, share and scaling of the rotation, wherever a version put them.

    transformers 5 has them in `rope_parameters`, by kind of layer where the kinds
    differ; older versions in keys of their own and in `rope_scaling`.

    Attributes:
      base: default base of transformers' class.
      fraction: its share of a head; None: all of it, and nothing else is known.
      local: its base of windowed layers, where they have one of their own.
      base_key, fraction_key: older names, next to those that all families know.
      original: what original_max_position_embeddings is where it is missing; None:
        max_position_embeddings.
      aliases: names that a family has for a rule.
    """

    base: float = 10000.0
    fraction: float | None = None
    local: float | None = None
    base_key: str | None = None
    fraction_key: str | None = None
    original: int | None = None
    aliases: tuple[tuple[str, str], ...] = (("su", "longrope"),)

    def read(self, keys: Keys, values: Values) -> None:
        base, fraction = self.base, self.fraction or 1.0
        for name in (self.base_key, "rope_theta"):
            base = base if name is None else keys.number(name, base)
        for name in (self.fraction_key, "partial_rotary_factor"):
            fraction = fraction if name is None else keys.number(name, fraction)
        # Half-split, as ours; the interleaved rotation is another function.
        keys.only("rope_interleaved", False, None)
        original = keys.optional_size("original_max_position_embeddings", self.original)
        context = (values["length"], original)
        new = _object(keys, "rope_parameters")
        old = _object(keys, "rope_scaling")
        if any(new.get(name, old[name]) != old[name] for name in old):
            keys.wrong(f"rope_scaling {old} and rope_parameters {new} differ")
        if self.local is None:
            values["position"] = self._rope(keys, old | new, base, fraction, context)
            return
        # Older files scale only the layers without a window.
        local = keys.number("rope_local_base_freq", self.local)
        kinds = {name: new.pop(name, None) or {} for name in _KINDS}
        for name in new:
            keys.wrong(f"rope_parameters.{name} is unknown")
        full, sliding = kinds.values()
        values["position"] = self._rope(keys, old | full, base, fraction, context)
        values["local_position"] = self._rope(keys, sliding, local, fraction, context)

    def write(self, values: Values) -> dict[str, Any]:
        position = values["position"]
        rope = position if isinstance(position, Rope) else Rope()
        written: dict[str, Any] = {"rope_theta": rope.base}
        new = _rope_parameters(rope)
        if self.fraction is not None:
            written[self.fraction_key or "partial_rotary_factor"] = rope.fraction
            new["partial_rotary_factor"] = rope.fraction
        if self.base_key is not None:
            written = {self.base_key: rope.base, **written}
        if rope.scaling is not None:
            # Older versions read this name, newer ones both.
            written["rope_scaling"] = new
        if self.original is not None:
            length = getattr(rope.scaling, "length", values["length"])
            written["original_max_position_embeddings"] = length
        if self.local is None:
            return written | {"rope_parameters": new}
        local = values["local_position"]
        local = local if isinstance(local, Rope) else Rope(base=self.local)
        by_kind = (new, _rope_parameters(local))
        return written | {
            "rope_local_base_freq": local.base,
            "rope_parameters": dict(zip(_KINDS, by_kind, strict=True)),
        }

    def _rope(
        self,
        keys: Keys,
        stated: dict[str, Any],
        base: float,
        fraction: float,
        context: tuple[int, int | None],
    ) -> Rope:
        inner = Keys(stated, where="rope_parameters")
        base = inner.number("rope_theta", base)
        fraction = inner.number("partial_rotary_factor", fraction)
        if self.fraction is None and fraction != 1:
            inner.wrong(f"partial_rotary_factor {fraction} is not supported, only 1")
        try:
            rope = Rope(
                base=base, fraction=fraction, scaling=self._scaling(inner, *context)
            )
        except ValueError as error:
            inner.wrong(str(error))
            rope = Rope()
        for problem in inner.problems():
            keys.wrong(f"rope_parameters: {problem}")
        return rope

    def _scaling(
        self, inner: Keys, length: int, original: int | None
    ) -> RopeScaling | None:
        """Reads a rule for long sequences.

        Args:
          length: max_position_embeddings.
          original: what the file says outside the rule, which counts.
        """
        named = inner.any("type")
        kind = inner.any("rope_type") or named or "default"
        kind = dict(self.aliases).get(kind, kind) if isinstance(kind, str) else kind
        stated = inner.size("original_max_position_embeddings", length)
        pretrained = original or stated
        match kind:
            case "default":
                return None
            case "linear":
                return LinearScaling(factor=inner.number("factor"))
            case "dynamic":
                factor = inner.number("factor")
                return DynamicScaling(factor=factor, length=length)
            case "llama3":
                return Llama3Scaling(
                    factor=inner.number("factor"),
                    low=inner.number("low_freq_factor"),
                    high=inner.number("high_freq_factor"),
                    length=pretrained,
                )
        factor = inner.optional("factor", None)
        factor = length / pretrained if factor is None else factor
        amplitude = inner.optional("attention_factor", None)
        match kind:
            case "yarn":
                share, of_all = (
                    inner.optional(name, None) for name in ("mscale", "mscale_all_dim")
                )
                if amplitude is None and share and of_all:
                    amplitude = _yarn_amplitude(factor, share)
                    amplitude /= _yarn_amplitude(factor, of_all)
                elif amplitude is None:
                    amplitude = _yarn_amplitude(factor, 1.0)
                return YarnScaling(
                    factor=factor,
                    length=pretrained,
                    fast=inner.optional("beta_fast", None) or 32.0,
                    slow=inner.optional("beta_slow", None) or 1.0,
                    truncate=inner.flag("truncate", True),
                    amplitude=amplitude,
                )
            case "longrope":
                if amplitude is None:
                    growth = math.log(factor) / math.log(pretrained)
                    amplitude = math.sqrt(1 + growth) if factor > 1 else 1.0
                return LongScaling(
                    short=inner.numbers("short_factor"),
                    long=inner.numbers("long_factor"),
                    length=pretrained,
                    amplitude=amplitude,
                )
        inner.wrong(f"rope_type {kind!r} is not supported (known: {', '.join(_RULES)})")
        return None


_RULES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_KINDS = ("full_attention", "sliding_attention")


def _object(keys: Keys, name: str) -> dict[str, Any]:
    value = keys.any(name)
    if value is None or isinstance(value, dict):
        return dict(value or {})
    keys.wrong(f"{name} must be an object, got {value!r}")
    return {}


def _yarn_amplitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _rope_parameters(rope: Rope) -> dict[str, Any]:
    """Returns the object that states a rotation, less its share."""
    written = {"rope_type": "default", "rope_theta": rope.base}
    match rope.scaling:
        case LinearScaling(factor=factor):
            return written | {"rope_type": "linear", "factor": factor}
        case DynamicScaling(factor=factor):
            return written | {"rope_type": "dynamic", "factor": factor}
        case Llama3Scaling() as rule:
            return written | {
                "rope_type": "llama3",
                "factor": rule.factor,
                "low_freq_factor": rule.low,
                "high_freq_factor": rule.high,
                "original_max_position_embeddings": rule.length,
            }
        case YarnScaling() as rule:
            return written | {
                "rope_type": "yarn",
                "factor": rule.factor,
                "original_max_position_embeddings": rule.length,
                "beta_fast": rule.fast,
                "beta_slow": rule.slow,
                "truncate": rule.truncate,
                "attention_factor": rule.amplitude,
            }
        case LongScaling() as rule:
            return written | {
                "rope_type": "longrope",
                "short_factor": list(rule.short),
                "long_factor": list(rule.long),
                "original_max_position_embeddings": rule.length,
                "attention_factor": rule.amplitude,
            }
    return written


@dataclass(frozen=True, slots=True)
class OneWindow:
    """sliding_window of all layers: theirs counts the token itself, ours does not."""

    default: int | None

    def read(self, keys: Keys, values: Values) -> None:
        values["windows"] = (_window(keys, self.default),)

    def write(self, values: Values) -> dict[str, Any]:
        return {"sliding_window": _written_window(values)}


@dataclass(frozen=True, slots=True)
class WindowedLayers:
    """Layers with a window: `layer_types`, or the equivalent keys of older files.

    Attributes:
      default: sliding_window where it is missing.
      kinds: reads the older keys, and says by layer whether it has a window.
      others: further keys to write.
    """

    default: int | None
    kinds: Callable[[Keys, Values], list[bool]]
    others: Callable[[Values], dict[str, Any]] = lambda values: {}

    def read(self, keys: Keys, values: Values) -> None:
        count, types = values["layers"], keys.any("layer_types")
        window = _window(keys, self.default)
        values["window"] = window
        windowed = self.kinds(keys, values)
        if types is not None:
            if not isinstance(types, list) or any(kind not in _KINDS for kind in types):
                keys.wrong(f"layer_types {types!r} is not supported (known: {_KINDS})")
                types = []
            elif len(types) != count:
                keys.wrong(f"layer_types has {len(types)} entries for {count} layers")
            windowed = [kind == _KINDS[1] for kind in types]
        values["windows"] = tuple(window if sees else None for sees in windowed)
        if not windowed:
            values["windows"] = (None,)

    def write(self, values: Values) -> dict[str, Any]:
        kinds = [_KINDS[window is not None] for window in values["windows"]]
        return {
            "sliding_window": _written_window(values),
            "layer_types": kinds,
            **self.others(values),
        }


def _window(keys: Keys, default: int | None) -> int | None:
    window = keys.optional_size("sliding_window", default)
    return None if window is None else window - 1


def _written_window(values: Values) -> int | None:
    # Layers of one model have one width; read back, another one shows.
    widths = [window + 1 for window in values["windows"] if window is not None]
    return max(widths, default=None)


@dataclass(frozen=True, slots=True)
class UnrotatedLayers:
    """no_rope_layers: 1 for a layer with rotation, 0 for one without (SmolLM3)."""

    interval: int

    def read(self, keys: Keys, values: Values) -> None:
        count = values["layers"]
        interval = keys.size("no_rope_layer_interval", self.interval)
        layers = keys.any("no_rope_layers")
        if layers is None:
            layers = [int((layer + 1) % interval != 0) for layer in range(count)]
        if not isinstance(layers, list) or len(layers) != count:
            keys.wrong(f"no_rope_layers must have {count} entries, got {layers!r:.60}")
            layers = [1]
        values["positioned"] = tuple(bool(layer) for layer in layers)

    def write(self, values: Values) -> dict[str, Any]:
        layers = [int(positioned) for positioned in values["positioned"]]
        return {"no_rope_layers": layers, "no_rope_layer_interval": self.interval}
