r"""A network of the model that learns which loss each of its predictions will have.

.. math::
   L = L_{\mathrm{words}} + \frac{1}{N} \sum_t (e(z_t) - \ell_t)^2, \qquad
   \ell_t = -\ln p(y_t \mid z_t)

where e is the network, :math:`z_t` what the output layer reads, and neither :math:`z_t` nor
:math:`\ell_t` gets a gradient: the model learns as without it. In use, where no target is known,
the network's gradient says how to change a state for a smaller loss (recoding by
`predicted_error`).

Source: the error signals of Ulmer 2019, section 4.2, of which it is the expectation; losses as
targets of a small network, Yoo and Kweon 2019, "Learning Loss for Active Learning".
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from compmod_jax.core.intermediates import OFF
from compmod_jax.core.losses import Term
from compmod_jax.data.tokenizers import PAD
from compmod_jax.models.base import ModelConfig
from compmod_jax.tasks.base import (
  Batch,
  Carry,
  Metrics,
  Objective,
  Params,
  Scoring,
  StepContext,
  TaskModel,
  Terms,
)

_TERM = "error_prediction"


@dataclasses.dataclass(frozen=True)
class WithErrorPrediction:
  """Adds the squared error of the expected losses, in nats squared.

  Attributes:
    objective: on the same batch; its model has the sites `logits` [batch, time, vocab] and `site`.
    site: of the expected losses of the tokens in the batch's `target`, [batch, time].
  """

  objective: Objective
  site: str

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """Those of the objective inside, and one term more."""
    return self.objective.weights(config) | {_TERM: 1.0}

  def __call__(
    self, model: TaskModel[Any], params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    outside = context.intermediates
    intermediates = outside.also(["logits", self.site])
    terms, carry, metrics = self.objective(
      model, params, carry, batch, context._replace(intermediates=intermediates)
    )
    outside.merge(intermediates.captured, intermediates.seen)
    captured = intermediates.captured
    expected, found, valid = _losses(captured["logits"], captured[self.site], batch)
    count = jnp.sum(valid)
    squares = jnp.sum(jnp.where(valid, (expected - found) ** 2, 0))
    return terms | {_TERM: Term(squares, count)}, carry, metrics


@dataclasses.dataclass(frozen=True)
class ErrorPredictionScores:
  """How well the losses of target tokens are predicted, given the tokens before.

  Attributes:
    site: as that of `WithErrorPrediction`.
  """

  site: str
  metric: str = ""
  units: str = (
    "Expected losses: nats per target token, and the share of the variance of losses that they"
    " explain."
  )

  def __call__(self, scoring: Scoring[Any]) -> Iterator[tuple[str, float]]:
    """See `Evaluator`."""
    count, expected, found, squares, errors = scoring.sums(self._sums)
    count = max(count, 1)
    variance = squares / count - (found / count) ** 2
    yield f"{_TERM}/expected_loss", expected / count
    yield f"{_TERM}/r2", 1 - errors / count / variance if variance > 0 else 0.0

  def _sums(self, model: TaskModel[Any], params: Params, batch: Batch) -> tuple[jax.Array, ...]:
    """Tokens, and sums of expected losses, of losses, of their squares and of squared errors."""
    intermediates = OFF.also(["logits", self.site])
    model.forward(params, batch, intermediates=intermediates)
    captured = intermediates.captured
    expected, found, valid = _losses(captured["logits"], captured[self.site], batch)
    summed = (jnp.ones_like(found), expected, found, found**2, (expected - found) ** 2)
    return tuple(jnp.sum(jnp.where(valid, one, 0)) for one in summed)


def _losses(
  logits: jax.Array, expected: jax.Array, batch: Batch
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Expected and true losses of target tokens, and where there are any; all [batch, time]."""
  target = batch["target"]
  rows = jax.nn.log_softmax(jax.lax.stop_gradient(logits).astype(jnp.float32))
  found = -jnp.take_along_axis(rows, target[..., None], axis=-1)[..., 0]
  return expected, found, target != PAD
