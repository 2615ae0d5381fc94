"""`--describe`: the diagram has every part once, and its numbers are those of other accounts."""

import dataclasses
import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_masked
import tiny_model
import tiny_recurrent

from compmod_jax.commands import train
from compmod_jax.core.config import to_json
from compmod_jax.core.errors import ChoiceError, UserError
from compmod_jax.data.qa.dataset import QuestionSets
from compmod_jax.data.synthetic import glyphs
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.layers.experts import ExpertsConfig
from compmod_jax.mechanisms.competition.drophead import DropHeadConfig
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.lstm_lm import LstmConfig
from compmod_jax.models.nemot import Nemot, NemotConfig
from compmod_jax.models.text import Text
from compmod_jax.models.transformer import ATTENTION_KINDS, TransformerConfig
from compmod_jax.tasks.causal_lm import CausalLMConfig
from compmod_jax.tasks.language_model import LanguageModelConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.tools import describe, diagram, flops
from compmod_jax.tools.diagram_parts import shapes_of
from compmod_jax.training.experiment import load_config

ROOT = Path(__file__).parents[2]
VOCAB = TokenizerConfig(vocab_size=96)
SMALL = {"dim": 16, "heads": 2, "ffn_dim": 24, "max_length": 24}
NEMOT = NemotConfig(vanilla_layers=3, modulatory_layers=2, output_layers=2, **SMALL)


def built(task, model):
  return task.build(model, files=describe.placeholders(task))


def translation(**fields):
  decode = fields.pop("decode", DecodeConfig())
  task = TranslationConfig(tokenizer=VOCAB, decode=decode)
  sizes = {"encoder_layers": 3, "decoder_layers": 2, **SMALL, "max_length": 128}
  return built(task, TransformerConfig(**{**sizes, **fields}))


def causal(model, length=25):
  return built(CausalLMConfig(tokenizer=VOCAB, length=length, batch_tokens=length), model)


@functools.cache
def parameters_of(task, model):
  """Without arrays; many models have the same plain one beside them."""
  return describe.abstract_parameters(built(task, model))


def parameters(task):
  return parameters_of(task.dataset.config, task.model.config)


def drawn(task):
  """The blocks of a diagram, whose sizes must add up, and its lines without the heading."""
  config = task.dataset.config
  return parts(task, parameters(task), parameters_of(config, task.model.config.plain()))


def parts(task, params, others):
  blocks = diagram.blocks_of(task, params, others)
  assert sum(block.size for block in blocks) == sum(leaf.size for leaf in jax.tree.leaves(params))
  rows = diagram.draw(blocks)
  assert all(row.isascii() and len(row) <= 100 for row in rows), rows
  return blocks, rows[1:]


def stars(blocks):
  """Parameters of mechanisms."""
  return sum(b.count * line.size for b in blocks for line in b.lines if line.mechanism)


def titles(rows):
  """What stands first in rows that are no part of a layer."""
  return [m[1] for row in rows if (m := re.match(r"[* ] (\S.*?)(?:  |$)", row)) and m[1][0] != "|"]


# Every configuration.


def variants(path):
  """The experiments of a configuration file, one for each model that it has."""
  with pytest.raises(ChoiceError) as error:
    load_config(f"{path}:?")
  found = [load_config(f"{path}:{name}") for name in error.value.choices[::-1]]
  # Of variants with the same model the first, whose data the project makes; of those that differ
  # in sizes alone the largest, whose numbers need the most room.
  found = sorted(found, key=lambda it: sum(numbers(to_json(it.model))))
  kinds = {str(without_sizes(to_json(it.model))): it for it in found}
  return [(shallow(it.model), it) for it in kinds.values()]


def numbers(value):
  """All numbers of a configuration."""
  if isinstance(value, int | float) and not isinstance(value, bool):
    yield value
  parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
  for part in parts:
    yield from numbers(part)


def without_sizes(value):
  """A configuration with every number in it as whether it is positive: 0 often turns a part off."""
  if isinstance(value, dict):
    return {name: without_sizes(part) for name, part in value.items()}
  if isinstance(value, list):
    return [without_sizes(part) for part in value]
  return value > 0 if isinstance(value, int | float) else value


def shallow(model):
  """The model with one layer where it has many, which makes no difference to a diagram.

  A model whose options name single layers has all of them.
  """
  chosen = ("expert_layers", "mechanism_layers", "depth_layers")
  if any(name[-1].isdigit() for field in chosen for name in getattr(model, field, ())):
    return model
  names = {field.name for field in dataclasses.fields(model)} - {*chosen}
  return dataclasses.replace(model, **{n: 1 for n in names if n.endswith("_layers")})


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.py")), ids=lambda path: path.stem)
def test_every_configuration_of_the_project_is_drawn_without_data_or_arrays(path, monkeypatch):
  monkeypatch.chdir(ROOT)
  # Of characters only the shape is needed; drawing 32,460 of them takes seconds.
  shape = (glyphs.CLASSES, glyphs.EXAMPLES, glyphs.SIZE, glyphs.SIZE)
  monkeypatch.setattr(glyphs, "_drawn", lambda _: np.zeros(shape, np.uint8))
  for model, experiment in variants(path):
    blocks, _ = drawn(built(experiment.task, model))
    marked = any(line.mechanism for block in blocks for line in block.lines)
    assert marked == (model.plain() != model or marks_decoding(experiment.task))


def marks_decoding(task):
  return getattr(getattr(task, "decode", None), "recode_layer", None) is not None


# Parts and places.


def test_competing_heads_and_experts_stand_where_they_are_with_the_parameters_they_add():
  competition = CompetitionConfig(key_dim=4, hidden_dim=8)
  experts = ExpertsConfig(count=3, competition=competition)
  task = translation(
    compete=("encoder_self", "cross"),
    competition=competition,
    expert_layers=("encoder_1",),
    experts=experts,
  )
  blocks, rows = drawn(task)
  router = 16 * 8 + 8 + 8 * 4 + 4
  heads, ffn = router + 2 * 4, 2 * 16 * 24 + 24 + 16
  assert stars(blocks) == 5 * heads + router + 3 * 4 + 3 * ffn
  added = describe.count_parameters(task) - describe.count_parameters(translation())
  assert added == stars(blocks) - ffn
  assert [name for name in titles(rows) if name[:2] in ("en", "de")] == [
    "encoder_embedding", "encoder_positions", "encoder 0", "encoder 1", "encoder 2",
    "decoder_embedding", "decoder_positions", "decoder 0-1", "decoder_embedding",
  ]  # fmt: skip
  marked = {b.name: [line.name for line in b.lines if line.mechanism] for b in blocks}
  assert marked["encoder_0"] == ["self_attention/router"]
  assert marked["encoder_1"] == ["self_attention/router", "ffn", "ffn/router"]
  assert marked["decoder_0"] == ["cross_attention/router"]


@pytest.mark.parametrize("remat", [False, True])
def test_what_has_no_parameters_is_marked_where_it_acts(remat):
  blocks, _ = drawn(
    translation(
      drophead=DropHeadConfig("constant", start=0.4),
      decode=DecodeConfig(recode_layer=-2, recode_size=3.0),
      remat=remat,
    )
  )
  found = {b.name: [(x.name, x.words) for x in b.lines if x.mechanism] for b in blocks}
  drop = [("self/heads", "DropHead in training, p = 0.4")]
  assert found["encoder_0"] == drop
  assert found["decoder_1"] == [*drop, ("cross/heads", drop[0][1])]
  assert found["decoder_0"][:2] == found["decoder_1"]
  (last,) = found["decoder_0"][2:]
  assert last[0] == "output"
  assert "recoded in decoding" in last[1]
  assert last[1].endswith("a step of 3")


@pytest.mark.parametrize("shared", ["none", "decoder", "all"])
def test_a_table_that_is_used_again_counts_once(shared):
  task = translation(share_embeddings=shared)
  blocks, _ = drawn(task)
  tables = [b for b in blocks if "embedding" in b.name]
  assert len(tables) == 3
  assert sum(b.size for b in tables) == {"none": 3, "decoder": 2, "all": 1}[shared] * 96 * 16
  assert tables[-1].lines[0].words == (
    "96 tokens x 16" if shared == "none" else "once more: logits"
  )


def test_the_gate_stands_after_what_it_reads_and_before_what_it_gates():
  model = dataclasses.replace(
    NEMOT,
    read_after=1,
    gate_start="half",
    gate_places=("vanilla_1/logits", "output_1/ffn"),
    compete=("modulatory_self",),
    vanilla_norm=True,
  )
  blocks, rows = drawn(causal(model))
  assert titles(rows) == [
    "embedding", "positions", "vanilla 0", "auxiliary_embedding", "modulatory 0-1",
    "gate_projection", "gate", "place_projections_vanilla_1/logits", "gates/vanilla_1/logits",
    "place_projections_output_1/ffn", "gates/output_1/ffn", "vanilla 1", "vanilla 2",
    "vanilla_norm", "gated", "output_lm 0", "output_lm 1", "output_norm_lm", "head",
  ]  # fmt: skip
  found = {b.name: [line.words for line in b.lines if line.mechanism] for b in blocks}
  assert found["vanilla/layer_1"] == ["gated: logits"]
  assert found["output_lm/layer_1"] == ["gated: ffn"]
  assert found["vanilla/layer_0"] == found["vanilla/layer_2"] == found["output_lm/layer_0"] == []
  plain = causal(dataclasses.replace(NEMOT, gate="off", vanilla_norm=True))
  added = describe.count_parameters(causal(model)) - describe.count_parameters(plain)
  assert stars(blocks) == added


@pytest.mark.parametrize("place", ["embedding", "vanilla"])
def test_reading_strategies_stand_where_they_are(place):
  model = dataclasses.replace(NEMOT, option_interaction=True, highlighting=place)
  task = Reading(model)
  blocks, rows = parts(task, *map(describe.abstract_parameters, (task, Reading(model.plain()))))
  names = titles(rows)
  where = names.index("highlight")
  assert names[where - 1] == {"embedding": "positions", "vanilla": "interaction"}[place]
  assert names.index("interaction") == names.index("vanilla 0-2") + 1
  sizes = {b.name: b.size for b in blocks}
  assert (sizes["interaction"], sizes["highlight"]) == (5 * 16 * 16, 8 * 16)
  assert all(
    line.mechanism for b in blocks if b.name in ("interaction", "highlight") for line in b.lines
  )


class Reading:
  """As much of a task as a diagram needs, with texts that have options and parts of speech."""

  decode = None

  def __init__(self, model):
    self.config, self.module = model, Nemot(model, 96)
    self.dataset = self.model = self.generator = self

  def example(self):
    return {"tokens": jnp.ones((1, 3), jnp.int32)}

  def forward(self, params, batch, **options):
    return self.module.apply({"params": params}, *self._given(batch), **options).logits

  @property
  def shapes(self):
    given = self._given(self.example())
    return jax.eval_shape(lambda: self.module.init(jax.random.key(0), *given)["params"])

  def _given(self, batch):
    tokens = batch["tokens"]
    ids = jnp.zeros((1, 3), jnp.int32)
    return Text(tokens, ids, None, tokens > 0, tokens), [("lm", 1)]


RECODING = [
  {"signal": "none"},
  {"signal": "surprisal"},
  {"signal": "entropy", "step": "learned"},
  {"signal": "nll", "step": "predicted", "steps": 2},
  {"signal": "ensemble", "samples": 3},
  {"signal": "locked_dropout", "samples": 3, "step": "safe", "when": "test"},
]


@pytest.mark.parametrize("recoding", RECODING, ids=lambda given: given["signal"])
def test_recoding_stands_in_every_layer_and_at_its_signal(recoding):
  model = LstmConfig(dim=8, embedding_dim=8, recoding=RecodingConfig(**recoding))
  task = built(LanguageModelConfig(tokenizer=VOCAB), model)
  blocks, rows = drawn(task)
  names = ["embedding", "layer 0-1", "decoder", "recoding signal"]
  assert titles(rows) == names[: 4 if model.recoding.active else 3]
  lines = {line.name: line for block in blocks for line in block.lines}
  assert lines["lstm"].size == 4 * 8 * (8 + 8 + 1)
  assert lines["decoder"].size == model.recoding.members * (8 * 96 + 96)
  assert ("recoding" in lines) == model.recoding.active
  assert lines["decoder"].mechanism == (model.recoding.members > 1)


# Floating-point operations.


def cost(task):
  return cost_of(task.dataset.config, task.model.config)


@functools.cache
def cost_of(task, model):
  return flops.count(built(task, model), parameters_of(task, model))


def products(task, extra=0):
  """2 for every parameter of a matrix that every token is multiplied with, and attention."""
  shapes = shapes_of(parameters(task))
  kernels = sum(
    math.prod(shape) for path, shape in shapes.items() if path.endswith(("kernel", "signatures"))
  )
  return 2 * (kernels + extra)


WIDE = {"dim": 128, "heads": 4, "ffn_dim": 512, "max_length": 128, "dropout": 0.0}
ONE = {**WIDE, "encoder_layers": 1, "decoder_layers": 1}


def test_a_plain_decoder_costs_what_its_matrices_and_attention_do():
  model = DecoderConfig(decoder_layers=2, tied=False, **WIDE)
  task = causal(model, length=65)
  found = cost(task)
  assert (found.rows, found.length) == (63, 64)
  # Q K^T and P V over all 64 keys, masked or not.
  expected = products(task) + 2 * 4 * 64 * 128
  # Norms, softmax, GELU, residual sums and the loss come on top.
  assert expected < found.forward < 1.04 * expected
  assert found.training == pytest.approx(3 * expected, rel=0.04)


def test_a_plain_transformer_costs_what_its_matrices_and_attention_do():
  task = translation(**ONE)
  found = cost(task)
  length = task.dataset.config.batch.longest
  assert found.length == length
  modules = 3
  expected = products(task, extra=96 * 128) + modules * 4 * length * 128
  assert expected < found.forward < 1.06 * expected
  assert found.training == pytest.approx(3 * expected, rel=0.06)


def test_an_lstm_costs_what_its_matrices_do_for_every_token_of_a_stretch():
  def task(signal):
    model = LstmConfig(
      dim=64, embedding_dim=64, dropout=0.0, recoding=RecodingConfig(signal=signal)
    )
    return built(LanguageModelConfig(tokenizer=VOCAB, length=7, rows=3), model)

  expected = 2 * (2 * 4 * 64 * (64 + 64) + 64 * 96)
  plain, recoded = (cost(task(signal)) for signal in ("none", "nll"))
  assert expected < plain.forward < 1.05 * expected
  assert plain.training == pytest.approx(3 * expected, rel=0.05)
  # The gradient goes back through the decoder and the upper layer's products with the lower one.
  back = 2 * (64 * 96 + 4 * 64 * 64)
  assert recoded.forward - plain.forward == pytest.approx(back, rel=0.1)


def test_competition_costs_its_routers():
  plain, competing = (translation(**ONE, compete=places) for places in ((), ATTENTION_KINDS))
  added = cost(competing).forward - cost(plain).forward
  router = 2 * (128 * 128 + 128 * 4)  # its last layer is multiplied with the signatures beforehand
  assert added == pytest.approx(3 * router, rel=0.1)


@pytest.mark.parametrize(("rule", "keep", "run"), [("soft", None, 8), ("top_k", 2, 2)])
def test_experts_cost_as_many_as_run(rule, keep, run):
  experts = ExpertsConfig(count=8, competition=CompetitionConfig(rule=rule, keep=keep))
  fields = {**WIDE, "decoder_layers": 1}
  plain = cost(causal(DecoderConfig(**fields), length=65))
  some = DecoderConfig(**fields, expert_layers=("decoder",), experts=experts)
  added = cost(causal(some, length=65)).forward - plain.forward
  one = 2 * 2 * 128 * 512
  # Biases, the router and what fills up blocks of rows come on top.
  assert run - 1 < added / one < run - 0.5


def test_answering_is_counted_without_its_questions_and_what_is_left_out_is_told(monkeypatch):
  monkeypatch.chdir(ROOT)
  experiment = load_config("configs/everything.py")
  task = built(experiment.task, shallow(experiment.model))
  monkeypatch.setattr(QuestionSets, "tokenized", lambda *_: pytest.fail("questions were read"))
  one = task, parameters(task)
  text = " ".join(describe.comparison(one, one))
  assert re.search(r"MFLOPs a token, training +[\d.]+ ", text)
  assert "vanilla set's own head is not counted. Recoding in decoding is not counted." in text


# The program.


def run(capsys, *argv):
  train.main([*argv, "--describe"])
  return capsys.readouterr().out


def test_the_program_prints_the_diagram_of_real_data_and_makes_no_workdir(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("COMPMOD_CACHE", str(tmp_path / "cache"))
  data = tiny_model.write_data(tmp_path / "data")
  experiment = tiny_model.make_experiment(data)
  monkeypatch.setattr(train, "parse", lambda *_: train.Args(experiment, describe=True))
  printed = run(capsys)
  task = experiment.task.build(experiment.model)
  plain = experiment.task.build(experiment.model.plain())
  counts = [describe.count_parameters(it) for it in (task, plain)]
  table = re.search(r"^parameters +([\d,]+) +([\d,]+) +(.*)%$", printed, re.MULTILINE)
  assert table is not None
  assert [int(number.replace(",", "")) for number in table.groups()[:2]] == counts
  assert float(table[3]) == pytest.approx(100 * (counts[0] / counts[1] - 1), abs=0.005)
  assert f"{task.model.module.source_vocab} tokens x 16" in printed
  assert "as large as configured" not in printed
  assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "data"]


def test_without_data_the_vocabulary_is_as_configured_and_that_is_told(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  printed = run(
    capsys,
    *("--config", str(ROOT / "configs/lm_recoding.py:text")),
    *("--config.model.dim=8", "--config.model.embedding_dim=8"),
  )
  assert "10,000 tokens x 8" in printed
  assert re.search(r"as\slarge\sas\sconfigured.*data/text", printed, re.DOTALL)
  assert "MFLOPs a token, training" in printed
  assert max(map(len, printed.splitlines())) <= 100


def test_the_page_of_every_kind_of_task_has_its_flops(tmp_path):
  folder = tiny_masked.write_text(tmp_path / "text", {"train": 40, "valid": 9, "test": 9})
  for experiment in (tiny_masked.make_experiment(folder), tiny_recurrent.make_experiment(folder)):
    page = describe.page(experiment)
    line = r"^MFLOPs a token, \w+ +([\d.]+) +([\d.]+) +([+-][\d.]+)%$"
    numbers = re.findall(line, page, re.MULTILINE)
    assert len(numbers) == 2
    assert all(float(mine) > 0 < float(plain) and float(more) > 0 for mine, plain, more in numbers)


def test_a_model_that_does_not_belong_to_the_task_is_a_mistake(tmp_path):
  folder = tiny_masked.write_text(tmp_path / "text", {"train": 40, "valid": 9, "test": 9})
  wrong = dataclasses.replace(tiny_masked.make_experiment(folder), model=TransformerConfig())
  with pytest.raises(
    UserError, match="model is a TransformerConfig, but the task needs an encoder"
  ):
    describe.page(wrong)
