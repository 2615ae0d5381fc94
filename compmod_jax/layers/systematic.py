"""Options of Transformers that are to generalise systematically: to new compositions and lengths.

Which positions a model knows is another one; see `layers.positions`.
"""

import dataclasses
from typing import Any, get_args

from compmod_jax.core import errors
from compmod_jax.layers.attention_forms import AttentionForm
from compmod_jax.layers.block import StackConfig
from compmod_jax.layers.mixture_of_depths import DepthRouterConfig
from compmod_jax.layers.positions import ADDED
from compmod_jax.layers.switch_head import SwitchHeadConfig


@dataclasses.dataclass(frozen=True)
class SystematicConfig(StackConfig):
  """Fields of the models that have these options; others have the values of `StackConfig`."""

  random_positions: int = 0
  """In training the tokens of every sequence have sorted random labels from a range of this size in
  place of the numbers of their positions, and else fixed ones, evenly spread over the range (Ruoss
  et al. 2023); at least max_length. 0: off."""
  shared_layers: int = 0
  """So many layers of every stack have parameters, and are repeated in turn up to its number of
  layers (a Universal Transformer without halting), which may differ between training and use: see
  `--model_fields`. 0: every layer has its own."""
  fewest_repeats: int = 0
  """With shared layers: in training every sequence goes through a number of repetitions of them
  that is drawn, from this one to all. 0: all."""
  attention_form: AttentionForm = "softmax"
  """How self-attention reads values: by a softmax over keys; the nearest key first (geometric;
  Csordas et al. 2022); through a network that the logits of all heads configure (hyla; Schug et al.
  2025); or by the difference of two softmaxes (differential; Ye et al. 2024)."""
  copy_gate: bool = False
  """Layers end in a gate between their input and what they compute, in place of the last residual
  sum (Csordas et al. 2022, where norm = post)."""
  copy_gate_closed: float = 0.0
  """With copy gates: in training the share of positions whose gates are 0; 0.05 to 0.1 there."""
  switch_heads: tuple[str, ...] = ()
  """Kinds of attention, as in `compete`, whose heads have several value and output projections, of
  which every token chooses some (SwitchHead; Csordas et al. 2024)."""
  switch_head: SwitchHeadConfig = SwitchHeadConfig()
  """How many there are, and are chosen."""
  depth_layers: tuple[str, ...] = ()
  """Layers, as in `expert_layers`, that every token goes through or passes by as its own activation
  says (mixture of depths; Raposo et al. 2024): in the original every other one."""
  depth_router: DepthRouterConfig = DepthRouterConfig()
  """How many tokens go through them."""

  def __post_init__(self):
    super().__post_init__()
    self._check_labels()
    self._check_shared()
    self._check_attention_form()
    self._check_copy_gate()
    errors.check(
      not self.switch_heads or not self.mechanism_layers,
      f"model.switch_heads is {self.switch_heads} and model.mechanism_layers"
      f" {self.mechanism_layers}; experts inside heads read the whole width, and a mechanism its"
      " own part. Leave one of them out.",
    )

  def _check_labels(self) -> None:
    labels = self.random_positions
    errors.check(
      labels == 0 or labels >= self.max_length,
      f"model.random_positions is {labels} and model.max_length {self.max_length}; every position"
      " needs a label of its own. Choose at least max_length, or 0 for none.",
    )
    errors.check(
      labels == 0 or self.positions != "none",
      f"model.random_positions is {labels}, but model.positions is 'none', and nothing reads"
      " labels. Leave it out, or choose other positions.",
    )

  def _check_shared(self) -> None:
    own, fewest = self.shared_layers, self.fewest_repeats
    for field in ("shared_layers", "fewest_repeats"):
      value = getattr(self, field)
      errors.check(value >= 0, f"model.{field} is {value}; it must be at least 0, 0 for none.")
    errors.check(
      own > 0 or fewest == 0,
      f"model.fewest_repeats is {fewest} but model.shared_layers 0; no layer is repeated. Set"
      " shared_layers, or leave fewest_repeats out.",
    )
    for side in self.sides() if own else ():
      layers = self.layers(side)
      errors.check(
        layers % own == 0,
        f"model.shared_layers is {own} and the {side} has {layers} layers; they are repeated as a"
        " whole. Choose a multiple.",
      )
      errors.check(
        fewest <= layers // own,
        f"model.fewest_repeats is {fewest}, but the {side} has {layers // own} repetitions of"
        f" {own} layers. Choose at most {layers // own}.",
      )
      errors.check(
        all(self.inside(side, i) == self.inside(side, i % own) for i in range(layers)),
        f"model.shared_layers is {own}, but model.expert_layers {self.expert_layers},"
        f" model.mechanism_layers {self.mechanism_layers} and model.depth_layers"
        f" {self.depth_layers} do not have all repetitions of a layer of the {side}. Name whole"
        " stacks.",
      )

  def _check_attention_form(self) -> None:
    errors.check_choice("model.attention_form", self.attention_form, get_args(AttentionForm))
    form = f"model.attention_form is {self.attention_form!r}"
    errors.check(
      self.attention_form == "softmax" or not self.mechanism_layers,
      f"{form} and model.mechanism_layers {self.mechanism_layers}; mechanisms, which read nothing"
      " of each other, have the softmax. Leave one of them out.",
    )
    errors.check(
      self.attention_form != "hyla" or self.heads > 1,
      f"{form} and model.heads {self.heads}; logits are normalised over heads. Use at least 2.",
    )
    width = self.head_dim or self.dim // self.heads
    errors.check(
      self.attention_form != "differential" or (width % 2 == 0 and self.positions != "rotary"),
      f"{form}, heads are {width} wide and model.positions is {self.positions!r}; queries and keys"
      " are cut in halves, which rotations mix. Use an even width and other positions.",
    )
    errors.check(
      self.scale_logits or (self.attention_form != "differential" and self.positions != "relative"),
      f"{form}, model.positions {self.positions!r} and model.scale_logits False; logits of"
      " differential attention, and of relative positions with vectors of their own, are always"
      " divided. Use scale_logits = True.",
    )
    errors.check(
      self.attention_form != "geometric" or self.positions in (*ADDED, "none"),
      f"{form} and model.positions {self.positions!r}; it knows distances itself, and no others act"
      f" in it. Use positions = none, or {' or '.join(ADDED)}.",
    )

  def _check_copy_gate(self) -> None:
    errors.check(
      not self.copy_gate or not self.mechanism_layers,
      f"model.copy_gate is set and model.mechanism_layers is {self.mechanism_layers}; a gate reads"
      " the whole width, and a mechanism its own part. Leave one of them out.",
    )
    errors.check(
      0 <= self.copy_gate_closed < 1,
      f"model.copy_gate_closed is {self.copy_gate_closed}; it must be at least 0 and below 1.",
    )

  def mechanisms_off(self) -> dict[str, Any]:
    """See `StackConfig`; forms of attention and gates are mechanisms."""
    return super().mechanisms_off() | {
      "attention_form": "softmax", "copy_gate": False, "switch_heads": (),
      "depth_layers": (),
    }  # fmt: skip

  def marks(self) -> dict[str, str]:
    """See `StackConfig`; attention as a hypernetwork has no parameters of its own."""
    if self.attention_form != "hyla":
      return super().marks()
    sites = [f"{name}/head_code" for name in self.attention_modules() if name.endswith("/self")]
    return super().marks() | dict.fromkeys(sites, "logits of all heads are a network's code")

  def describe_competition(self) -> str:
    """What competes where, and which of these options are on, in a few words."""
    own, words = self.shared_layers, [super().describe_competition()]
    if self.attention_form != "softmax":
      words.append(f"self-attention is {self.attention_form}")
    words += ["copy gates"] * self.copy_gate
    if self.switch_heads:
      kinds = " and ".join(kind.replace("_", " ") for kind in self.switch_heads)
      words.append(f"{self.switch_head.experts} experts inside heads of {kinds} attention")
    if self.depth_layers:
      where = " and ".join(name.replace("_", " layer ") for name in self.depth_layers)
      words.append(f"tokens may pass by layers in the {where}")
    words += [f"{own} layer{'s' * (own > 1)} repeated in each stack"] * bool(own)
    return ", ".join(words)

  def systematic_options(self) -> dict[str, Any]:
    """The options of this class that are not as they are by default, and their values."""
    others = {field.name for field in dataclasses.fields(StackConfig)}
    return {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(SystematicConfig)
      if field.name not in others and getattr(self, field.name) != field.default
    }

  def check_layout(self, layout: str) -> None:
    """Raises a `UserError` if any of these options is on, none of which a layout can hold."""
    given = ", ".join(f"{name} = {value!r}" for name, value in self.systematic_options().items())
    errors.check(
      not given, f"model has {given}; {layout} has nothing like that. Export a model without these."
    )
