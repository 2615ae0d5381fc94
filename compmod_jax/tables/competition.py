"""Whether competition helps: all settings of its choices, at equal numbers of parameters."""

import dataclasses
import itertools

from compmod_jax.core.errors import check_choice
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tables.grid import Column
from compmod_jax.tables.spec import Row, Spec, with_model
from compmod_jax.tables.translation import BLEU, MUON, PLACES, TEST, shifted_columns, translation
from compmod_jax.training.experiment import Experiment, Phase, load_config, translation_task

STEPS = 1000
WIDTHS = {"none": 512, "enc": 472, "dec+x": 432, "all": 400}
"""Where heads compete -> width of feed-forward networks with which the model for the grammar has as
many parameters, within 1 %, as the plain one; see `tools.equal`."""
TATOEBA_WIDTHS = {"none": 896, "enc": 848, "all": 800}
"""The same for the model for Tatoeba."""
_WEIGHTS = {
  "published": "weights of heads sum to 1",
  "rescaled": "weights of heads sum to their number",
}


def competition(scale: str) -> Spec:
  """Heads compete or not, in which places, with which norms and how many, and how they are scaled.

  `published` and `rescaled` are all settings of four factors on the grammar: in the first, the
  weights of H heads sum to 1, as in Kolios 2023, so that each head starts at 1 / H of what it is in
  a plain model; in the second they are multiplied by H. `tatoeba` has both ways beside the plain
  model on Tatoeba. All are trained by Muon. Whether `STEPS` are the end of training on the grammar
  has not been measured.

  Raises:
    UserError: an unknown scale.
  """
  check_choice("--scale", scale, (*_WEIGHTS, "tatoeba"))
  return _tatoeba() if scale == "tatoeba" else _grammar(scale)


def _grammar(scale: str) -> Spec:
  base = translation("tiny")
  task = dataclasses.replace(
    translation_task(base), data=GrammarData(train=100_000, test=400, shifted=200)
  )
  base = dataclasses.replace(
    base,
    task=task,
    optimizer=MUON,
    phases=(Phase(steps=STEPS),),
    evaluate_every=STEPS,
    model_selection="last",
    score_train=False,
  )
  rows, on = {}, {}
  for norm, heads, place in itertools.product(("pre", "post"), (4, 8), WIDTHS):
    name = f"{norm}-norm, {heads} heads, {place}"
    plain = with_model(base, norm=norm, heads=heads)
    rows[name] = Row(_competing(plain, place, WIDTHS, rescale=scale == "rescaled"))
    on[name] = {
      "encoder": place in ("enc", "all"),
      "decoder and cross": place in ("dec+x", "all"),
      "post-norm": norm == "post",
      "8 heads": heads == 8,
    }
  factors = {
    factor: tuple(name for name, settings in on.items() if settings[factor])
    for factor in next(iter(on.values()))
  }
  columns = (
    Column(BLEU, "test", "bleu"),
    Column(TEST, "test", "perplexity", 3, lower=True),
    *shifted_columns(),
  )
  data = f"the project's grammar, {STEPS:,} steps; {_WEIGHTS[scale]}"
  reference = "pre-norm, 4 heads, none"
  title = "Whether competition helps (after Kolios 2023, Table 5.1)"
  return Spec(title, data, rows, reference, columns, factors)


def _tatoeba() -> Spec:
  base = load_config("nmt_cah:tatoeba")
  base = dataclasses.replace(
    with_model(base, compete=(), dropout=0.05),
    optimizer=MUON,
    phases=(Phase(steps=3600),),
    evaluate_every=1800,
    evaluate_sentences=200,
    products="bfloat16",
    model_selection="last",
    time_limit_minutes=0.0,
  )
  rows = {"none": Row(base)}
  for place, (scale, text) in itertools.product(("enc", "all"), _WEIGHTS.items()):
    rows[f"{place}, {text}"] = Row(
      _competing(base, place, TATOEBA_WIDTHS, rescale=scale == "rescaled")
    )
  columns = (
    Column(BLEU, "test", "bleu"),
    Column("BLEU unseen", "test-unseen", "bleu"),
    Column(TEST, "test", "perplexity", 3, lower=True),
  )
  title = "Whether competition helps on Tatoeba, German to English"
  return Spec(title, f"{base.phases[0].steps:,} steps of Muon", rows, "none", columns)


def _competing(
  plain: Experiment, place: str, widths: dict[str, int], *, rescale: bool
) -> Experiment:
  """The experiment with competing heads in a place and as many parameters."""
  assert isinstance(plain.model, TransformerConfig)
  config = dataclasses.replace(plain.model.competition, rescale=rescale and place != "none")
  return with_model(plain, compete=PLACES[place], competition=config, ffn_dim=widths[place])
