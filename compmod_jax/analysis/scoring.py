"""Losses and outputs of every sentence, under edits that are arguments of a compiled function."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from compmod_jax.analysis.reading import Reader
from compmod_jax.analysis.subject import Subject
from compmod_jax.core.intermediates import Edit, Intermediates
from compmod_jax.core.losses import cross_entropy
from compmod_jax.tasks.base import Batch
from compmod_jax.tasks.translator import Edits

Losses = Callable[..., tuple[np.ndarray, np.ndarray]]


def sentence_losses(subject: Subject, reader: Reader) -> Losses:
  """A function from parameters and edits to every example's loss.

  Args:
    subject: model and sentences.
    reader: says what is to be predicted.

  Returns:
    A function `(params, edits)`; edits are `jax.tree_util.Partial`, so that the same functions with
    other arrays are not compiled again. It returns, in the order of `subject.numbers`, negative
    log likelihoods in nats without label smoothing, and the tokens that they are of; float64 [n].
  """

  @jax.jit
  def of_batch(params: PyTree, batch: Batch, edits: Mapping[str, Edit]) -> jax.Array:
    logits = subject.task.model.forward(
      params, batch, intermediates=Intermediates(edits=dict(edits))
    )
    labels, counted = reader.targets(batch)

    def of_row(logits: jax.Array, labels: jax.Array, counted: jax.Array) -> jax.Array:
      found = cross_entropy(logits[None], labels[None], counted[None])
      return jnp.stack([found.nll, found.count])

    return jax.vmap(of_row)(logits, labels, counted)

  placed = [subject.place(batch) for batch in subject.batches]

  def losses(params: PyTree, edits: Mapping[str, Edit]) -> tuple[np.ndarray, np.ndarray]:
    found = [of_batch(params, batch, dict(edits)) for batch in placed]
    rows = np.concatenate([np.asarray(part, np.float64) for part in jax.device_get(found)])
    index = np.concatenate([batch["index"] for batch in subject.batches])
    order = np.argsort(index, kind="stable")
    order = order[index[order] >= 0]
    return rows[order, 0], rows[order, 1]

  return losses


def translates(subject: Subject, reader: Reader) -> bool:
  """Whether outputs are searched for, from one stream, of which the other has the references."""
  return subject.task.generator.decode is not None and len(reader.streams) == 2


def decoded(
  subject: Subject,
  reader: Reader,
  numbers: Sequence[int] | np.ndarray,
  *,
  edits: Edits | None = None,
  name: str = "sentences",
) -> tuple[list[str], list[str]]:
  """Outputs and references of some examples of the subject's split.

  Args:
    subject: a model whose task translates.
    reader: knows the texts.
    numbers: of the examples.
    edits: as a `Translator` takes them.
    name: what the progress display calls them.
  """
  task = subject.task
  sources, references = (
    [reader.texts(stream, subject.split)[int(number)] for number in numbers]
    for stream in reader.streams
  )
  found = task.generator(
    task.model,
    subject.params,
    sources,
    references=references,
    sharing=subject.sharing,
    edits=edits,
    status=subject.status,
    name=name,
  )
  return [hypotheses[0].text for hypotheses in found], references
