"""Configuration of recoding in recurrent language models."""

import dataclasses
from typing import Literal, get_args

from compmod_jax.core.bounds import check_least
from compmod_jax.core.config import renamed
from compmod_jax.core.errors import check, check_choice

SignalName = Literal[
  "none",
  "surprisal",
  "argmax",
  "nll",
  "entropy",
  "mc_dropout",
  "locked_dropout",
  "variational_rnn",
  "ensemble",
  "weak_supervision",
  "predicted_error",
]
# Signals that know what they are scored on: the prediction is the one from before recoding.
KNOWS_THE_TARGET = ("surprisal", "argmax", "nll", "weak_supervision")
# Signals whose samples are copies of the state, each under masks that stay for a stretch of text.
COPIED = ("locked_dropout", "variational_rnn")
# Signals that are made of a probability alone and have no unit; the others are in nats.
WITHOUT_UNIT = ("surprisal", "argmax")
# Parameters that are no matrices although they have two axes or more: nothing pulls them to zero.
STANDING = ("steps", "anchor")


@dataclasses.dataclass(frozen=True)
class AnchorConfig:
  """The anchored ensemble of decoders (Pearce et al. 2018; Ulmer 2019, equation 4.11)."""

  variance: float = 0.29
  """Variance of the normal distribution from which anchors are drawn, mean 0."""
  initial: bool = False
  """Also draw the decoders' initial weights from it."""
  shared: bool = False
  """One anchor for all members (the thesis's amortised form), or one each."""
  squared: bool = False
  """The anchor term is the squared norm (Pearce et al.), or the norm (as published)."""
  weight_decay: float = 4.82e-5
  """Gamma: the prior's precision relative to the data's."""
  independent: bool = False
  """Every decoder learns from its own loss, as one that is trained alone; the layers below it from
  the mean of all losses. If not, decoders also learn from the mean, in which each has a K-th of its
  gradient: with SGD they learn K times as slowly."""

  def __post_init__(self):
    check(self.variance > 0, f"anchor.variance is {self.variance}; it must be positive.")
    check(
      self.weight_decay >= 0, f"anchor.weight_decay is {self.weight_decay}; it cannot be negative."
    )


@dataclasses.dataclass(frozen=True)
class RecodingConfig:
  """What is lowered by gradient steps on hidden and cell states, and how far they go."""

  signal: SignalName = dataclasses.field(
    default="none", metadata=renamed({"variational": "locked_dropout"})
  )
  """The error signal: none; of the right token (surprisal, nll) or of the most probable one
  (argmax); the entropy of the output (entropy) or of a mean of several; a classifier's loss
  (weak_supervision); the loss that a network expects of the prediction, which learns to tell it
  beside the model (predicted_error). Several are: mc_dropout, masks on what the decoder reads, new
  at every step; locked_dropout, copies of the state, each under masks on layers' outputs that stay
  for a stretch (Merity et al. 2018); variational_rnn, the same with masks on words, on what layers
  read and on their recurrent states besides (Gal and Ghahramani 2016); ensemble, decoders."""
  step: Literal["constant", "learned", "predicted", "safe"] = "constant"
  """The step size: constant; learned, one for each layer and kind of state; predicted from each
  layer's hidden state; safe: 1/L for an estimate of the Lipschitz constant L, halved until the
  error does not rise."""
  size: float = 5.0
  """The step size, or where a learned or predicted one starts; largest step where it is safe."""
  layers: Literal["all", "top"] = "all"
  """Whose states are recoded: those of all layers, or those of the top one alone, which needs no
  product through the layers below."""
  steps: int = 1
  """Gradient steps at every token."""
  through: bool = False
  """Training differentiates the recoding gradient too (second order)."""
  samples: int = 15
  """K: samples of dropout, or members of the ensemble."""
  rate: float = 0.42
  """Share dropped by mc_dropout, locked_dropout and variational_rnn."""
  on: Literal["hidden", "weights"] = "hidden"
  """What mc_dropout drops: the decoder's input, or its weights."""
  anchor: AnchorConfig = AnchorConfig()
  """The ensemble's prior."""
  classifier: str = ""
  """The classifier for weak_supervision: `result.json` of `train.analyse probe`."""
  share: float = 1.0
  """Share of what `limit` names that is recoded, drawn at random."""
  limit: Literal["steps", "batches"] = "steps"
  """Whether `share` is one of time steps or of batches."""
  only: tuple[int, ...] = ()
  """Recode at these steps of every sequence alone, counted from 0; none: at all."""
  when: Literal["always", "train", "test"] = "always"
  """Recode in training and in use, or in one of them alone."""
  implementation: Literal["auto", "definition"] = "auto"
  """auto: closed forms where there are any; definition: `jax.grad` throughout."""

  def __post_init__(self):
    check(
      self.signal != "variational",
      "recoding.signal is 'variational', which is now called 'locked_dropout'; Gal and Ghahramani's"
      " masks are 'variational_rnn'. Choose one of the two.",
    )
    check_choice("recoding.signal", self.signal, get_args(SignalName))
    for field in ("step", "layers", "on", "limit", "when", "implementation"):
      choices = get_args(RecodingConfig.__annotations__[field])
      check_choice(f"recoding.{field}", getattr(self, field), choices)
    check(self.size >= 0, f"recoding.size is {self.size}; it must not be negative.")
    check(
      self.step in ("constant", "safe") or self.size > 0,
      f"recoding.size is {self.size}; a {self.step} step size starts at a positive one.",
    )
    check(
      not self.classifier or self.signal == "weak_supervision",
      f"recoding.classifier is {self.classifier!r}, but recoding.signal is {self.signal}, which has"
      " no use for it; leave it out.",
    )
    check_least(self, "recoding.", steps=1)
    check(
      self.step != "safe" or self.steps == 1,
      f"recoding.steps is {self.steps}, but recoding.step is safe, whose step size is found for one"
      " step; set steps to 1 or choose another step size.",
    )
    check_least(self, "recoding.", samples=1)
    check(0 <= self.rate < 1, f"recoding.rate is {self.rate}; it must be at least 0 and below 1.")
    check(0 <= self.share <= 1, f"recoding.share is {self.share}; it must lie between 0 and 1.")
    check(
      all(step >= 0 for step in self.only),
      f"recoding.only is {self.only}; steps are counted from 0.",
    )

  @property
  def active(self) -> bool:
    """Whether anything is recoded."""
    return self.signal != "none"

  def applies(self, *, train: bool) -> bool:
    """Whether anything is recoded in training, or else in use."""
    return self.active and self.when in ("always", "train" if train else "test")

  def lowest(self, layers: int) -> int:
    """Number of the lowest layer whose states are recoded."""
    return layers - 1 if self.layers == "top" else 0

  @property
  def by_definition(self) -> bool:
    """Whether `jax.grad` takes the gradients, for want of closed forms or by request."""
    dropped_weights = self.signal == "mc_dropout" and self.on == "weights"
    return self.implementation == "definition" or self.steps > 1 or dropped_weights

  @property
  def supervised(self) -> bool:
    """Whether predictions are scored from before recoding."""
    return self.signal in KNOWS_THE_TARGET

  @property
  def copies(self) -> int:
    """Copies of the recurrent state."""
    return self.samples if self.signal in COPIED else 1

  @property
  def members(self) -> int:
    """Decoders."""
    return self.samples if self.signal == "ensemble" else 1
