"""Sizes and options of the Neuromodulated Transformer, and of decoders without modulation."""

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_numbers
from compmod_jax.layers.feedforward import Activation
from compmod_jax.layers.positions import Positions
from compmod_jax.layers.stack_config import TextStackConfig
from compmod_jax.mechanisms.modulation import KINDS
from compmod_jax.models.base import ModelConfig

if TYPE_CHECKING:
  from compmod_jax.models.nemot import EncoderMode, Nemot

GATE = "gate"
LM = "lm"  # the task of running text
VANILLA, MODULATORY, OUTPUT = "vanilla", "modulatory", "output"
MODES = ("enc", "dec")
# From kinds of gates to the site that follows what they gate.
_GATED_AT = {"attention": "self/heads_scaled", "logits": "self/heads_scaled", "ffn": "output"}


@dataclasses.dataclass(frozen=True)
class NemotConfig(TextStackConfig, ModelConfig):
  """Sizes and options of NeMoT; the defaults are the thesis's model with positions of its own.

  Source: Knowles 2022, chapter 3.
  """

  vanilla_layers: int = 12
  """Layers of the vanilla set, normalised before."""
  modulatory_layers: int = 12
  """Layers of the neuromodulatory set, normalised before."""
  output_layers: int = 3
  """Layers of every task's output set, normalised after."""
  tasks: tuple[str, ...] = ("lm",)
  """Tasks, each with an auxiliary token and an output set of its own."""
  extra_tokens: tuple[str, ...] = ()
  """Further auxiliary tokens, in front of every text."""
  compete: tuple[Literal["vanilla_self", "modulatory_self", "output_self"], ...] = ()
  """Sets whose self-attention heads compete; all output sets are one place."""
  gate: Literal["on", "off"] = "on"
  """Whether the neuromodulatory set gates the vanilla set's output; off leaves it out."""
  gate_start: Literal["stream", "half"] = "stream"
  """The gate is the sigmoid of the neuromodulatory stream, as in the thesis; or of a projection of
  it that starts from zeros, so that every gate starts at one half."""
  read_after: int = -1
  """The neuromodulatory set reads what so many vanilla layers put out; 0: embeddings, -1: all."""
  gate_places: tuple[str, ...] = ()
  """What else is gated: vanilla_<i>/KIND or output_<i>/KIND, where KIND is attention, ffn or logits
  and the layer is computed after what the neuromodulatory set reads."""
  tied_key_value: bool = False
  """Keys are values, too, in the neuromodulatory and output sets, as in the thesis's program."""
  positions: Positions = "sinusoidal"
  """Fixed vectors added to embeddings, learned ones as in GPT-2, rotary or relative positions."""
  scale_embeddings: bool = True
  """Token vectors have standard deviation 1/sqrt(dim) at first and are multiplied by sqrt(dim);
  else they have 0.02 and are not, as in GPT-2."""
  vanilla_norm: bool = False
  """Normalise the vanilla set's output, as GPT-2 does."""
  option_interaction: bool = False
  """Positions of answer options attend to each other in the vanilla set's output."""
  highlighting: Literal["off", "embedding", "vanilla"] = "off"
  """Where vectors for parts of speech are added."""
  dim: int = 768
  """Model width, a multiple of `heads`."""
  heads: int = 12
  """Attention heads of every layer."""
  ffn_dim: int = 3072
  """Width of the feed-forward networks' hidden layer."""
  activation: Activation = "gelu"
  """Nonlinearity of the feed-forward networks."""
  max_length: int = 768
  """Most tokens of a text."""
  dropout: float = 0.1
  """Dropout on embedding sums and sub-layer outputs."""

  def __post_init__(self):
    check_numbers(self, "model.")
    errors.check(bool(self.tasks), "model.tasks is empty; give at least one, for example lm.")
    names = ("cls", *self.extra_tokens, *MODES, *self.tasks)
    errors.check(
      len(set(names)) == len(names) and all(re.fullmatch(r"[a-z][a-z0-9]*", n) for n in names),
      f"The auxiliary tokens would be {', '.join(names)}; extra_tokens and tasks must be different"
      " lower-case names, none of them cls, enc or dec.",
    )
    for field in ("vanilla_layers", "modulatory_layers", "output_layers"):
      value = getattr(self, field)
      errors.check(value >= 1, f"model.{field} is {value}; it must be at least 1.")
    errors.check_choice("model.gate", self.gate, ("on", "off"))
    errors.check_choice("model.gate_start", self.gate_start, ("stream", "half"))
    errors.check_choice("model.highlighting", self.highlighting, ("off", "embedding", "vanilla"))
    errors.check(
      -1 <= self.read_after <= self.vanilla_layers,
      f"model.read_after is {self.read_after}; give a number of vanilla layers, 0 to"
      f" {self.vanilla_layers}, or -1 for all.",
    )
    super().__post_init__()
    self._check_places()

  def _check_places(self) -> None:
    errors.check(
      self.gate == "on" or not self.gate_places,
      f"model.gate_places is {self.gate_places} but model.gate is off; nothing would make these"
      " gates. Switch the gate on, or leave gate_places empty.",
    )
    later = [f"{VANILLA}_{i}" for i in range(self.reads, self.vanilla_layers)]
    later += [f"{OUTPUT}_{i}" for i in range(self.output_layers)]
    for place in self.gate_places:
      errors.check_choice(
        "model.gate_places", place, [f"{layer}/{kind}" for layer in later for kind in KINDS]
      )

  @property
  def reads(self) -> int:
    """How many vanilla layers are below what the neuromodulatory set reads."""
    return self.vanilla_layers if self.read_after == -1 else self.read_after

  @property
  def auxiliary(self) -> tuple[str, ...]:
    """All auxiliary tokens, in the order of their ids."""
    return ("cls", *self.extra_tokens, *MODES, *self.tasks)

  def auxiliary_ids(self, mode: str, task: str) -> list[int]:
    """The ids that stand before a text: `<cls>`, further ones, mode and task.

    Raises:
      UserError: an unknown mode or task.
    """
    errors.check_choice("mode", mode, MODES)
    errors.check_choice("task", task, self.tasks)
    return [self.auxiliary.index(name) for name in ("cls", *self.extra_tokens, mode, task)]

  @property
  def before(self) -> int:
    """How many auxiliary tokens stand before a text."""
    return 3 + len(self.extra_tokens)

  def sides(self) -> tuple[str, ...]:
    """The vanilla, the neuromodulatory and the output sets."""
    gate = (MODULATORY,) if self.gate == "on" else ()
    return (VANILLA, *gate, *(f"{OUTPUT}_{task}" for task in self.tasks))

  def last_side(self, task: str) -> str:
    """The set whose output gives a task's logits."""
    return f"{OUTPUT}_{task}"

  def layers(self, side: str) -> int:
    """Layers of a set."""
    counts = {VANILLA: self.vanilla_layers, MODULATORY: self.modulatory_layers}
    return counts.get(side, self.output_layers)

  def attention(self, side: str) -> tuple[tuple[str, str], ...]:
    """Self-attention; all output sets are one place."""
    return ((f"{side.split('_')[0]}_self", "self"),)

  def plain(self) -> "NemotConfig":
    """The same model without any competition, gate and reading strategy."""
    off = {"gate": "off", "gate_places": (), "option_interaction": False, "highlighting": "off"}
    return dataclasses.replace(super().plain(), **off)

  def marks(self) -> dict[str, str]:
    """Site or module -> what a mechanism does there besides what its parameters tell."""
    found = super().marks()
    if self.gate == "on":
      made = "a projection of the stream" if self.gate_start == "half" else "the stream"
      found["auxiliary_embedding"] = "in front of what follows"
      found["gate"] = f"sigmoid of {made} of the neuromodulatory set"
      found["gated"] = "the vanilla set's output times the gate"
    for place in self.gate_places:
      layer, kind = place.split("/")
      found[f"gates/{place}"] = f"gate on the {kind} of {layer}: sigmoid of a projection"
      own, number = layer.rsplit("_", 1)
      for side in self.sides():
        if side.split("_")[0] == own:
          site = f"{side}/layer_{number}/{_GATED_AT[kind]}"
          also = f"{found[site]}; " if site in found else ""
          found[site] = f"{also}gated: {kind}"
    return found

  def describe(self) -> str:
    """Sizes, gates and competition, in a few words."""
    sets = f"{self.vanilla_layers} vanilla"
    if self.gate == "on":
      sets += f", {self.modulatory_layers} neuromodulatory"
    outputs = " and ".join(self.tasks)
    sets += f" and {self.output_layers} output layers ({outputs})"
    gated = "" if self.gate == "on" else ", gate off"
    places = f", also gated: {' '.join(self.gate_places)}" if self.gate_places else ""
    return (
      f"{sets} of width {self.dim} and {self.heads} heads{gated}{places}"
      f" ({self.describe_competition()})"
    )

  def decoder(self, vocab: int, pad: int) -> "Nemot":
    """The module."""
    from compmod_jax.models.nemot import Nemot  # which imports its configuration

    return Nemot(self, vocab, pad)

  def encoder(self, vocab: int, pad: int) -> "EncoderMode":
    """The module in encoder mode, on running text.

    Raises:
      UserError: as `check_running_text`.
    """
    from compmod_jax.models.nemot import EncoderMode

    self.check_running_text()
    return EncoderMode(self, vocab, pad)

  def check_running_text(self) -> None:
    """Raises a `UserError` unless the model can read text without questions."""
    errors.check_choice(f"task {LM!r}, which language modelling needs,", LM, self.tasks)
    errors.check(
      self.tasks == (LM,),
      f"model.tasks is {', '.join(self.tasks)}, but running text trains the output set of {LM}"
      f" alone. Set tasks to {LM}; a model of more tasks can start from the trained one (start).",
    )
    errors.check(
      not self.reads_options and not self.reads_tags,
      "model.option_interaction or model.highlighting is on, but running text has neither answer"
      " options nor parts of speech. Switch them off.",
    )

  def output_tasks(self) -> tuple[str, ...]:
    """Every task has an output set."""
    return self.tasks

  def for_tasks(self, tasks: Sequence[str]) -> "NemotConfig":
    """The configuration as if it had the output sets of these tasks alone: those that run."""
    away = {f"{OUTPUT}_{task}" for task in self.tasks} - {f"{OUTPUT}_{task}" for task in tasks}
    experts = tuple(
      name for name in self.expert_layers if not {name, name.rpartition("_")[0]} & away
    )
    return dataclasses.replace(self, tasks=tuple(dict.fromkeys(tasks)), expert_layers=experts)

  def unused_parameters(self, tasks: Sequence[str]) -> tuple[str, ...]:
    """Those of the other tasks' output sets."""
    away = [task for task in self.tasks if task not in tasks]
    return tuple(name for t in away for name in (f"{OUTPUT}_{t}", f"{OUTPUT}_norm_{t}"))

  def auxiliary_at(self, site: str) -> int:
    """Auxiliary tokens stand before a text in the neuromodulatory set alone."""
    return self.before if site.startswith(f"{MODULATORY}/") else 0

  def gate_site(self) -> str | None:
    """The gate of the vanilla set's output."""
    return GATE if self.gate == "on" else None

  @property
  def reads_options(self) -> bool:
    """Whether positions of answer options see each other."""
    return self.option_interaction

  @property
  def reads_tags(self) -> bool:
    """Whether vectors for parts of speech are added."""
    return self.highlighting != "off"

  @property
  def has_vanilla_head(self) -> bool:
    """The vanilla set has a head of its own."""
    return True
