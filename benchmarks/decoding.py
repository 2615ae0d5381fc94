"""Decoding beside Hugging Face and CTranslate2, the same random weights in all three, in one run.

    python -m benchmarks.decoding [--quick] [--json FILE] [--check]

Needs the environment of `make test-peers`. CPU. Translation: the thesis's model (6 + 6 layers of
width 512, as Marian has them), 32 sentences of 12 to 31 tokens in one batch, whose translations
end by themselves or after 40 tokens; with 5 beams and greedily. Hugging Face searches until the
last sentence is done, CTranslate2 and we go on with fewer. Generation: a decoder shaped as GPT-2, 6
layers of width 384, 64 tokens after prompts of 128, greedily.

float32; besides, our products of operands rounded to bfloat16 (`products="bfloat16"`), and
CTranslate2's int8. Outputs are compared. In full about 5 minutes on 2 cores.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import common, nemot
from benchmarks.marian import peaked, to_marian
from benchmarks.transformer import RECIPE
from benchmarks.translation_case import Case
from compmod_jax.core.rounding import rounded
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.tokenizers import BOS, EOS, PAD, UNK
from compmod_jax.decoding import DecodeConfig
from compmod_jax.tasks.translator import Translator

ROUNDS = 6
PARTS = ("beams", "greedy", "generation")
ROWS = 32
PADDED, MOST = 32, 40  # tokens of a source, and most of a translation
STOP = 10.0  # on the end token's logit: some translations end early, others at their limits
NEVER = (PAD, BOS, UNK)
DECODE = DecodeConfig(beams=5, max_ratio=0.0, max_extra=MOST)
HUGGING_FACE, OURS, ROUNDED = "Hugging Face", "ours", "ours, bfloat16 products"
FLOAT32, INT8 = "CTranslate2 float32", "CTranslate2 int8"
Sources = Sequence[Sequence[int]]
Translate = Callable[[], list[list[int]]]


class Numbers:
  """A tokenizer of texts that are numbers of tokens."""

  never_produced = NEVER

  def encode_batch(self, texts: list[str]) -> list[list[int]]:
    """The numbers in every text."""
    return [[int(word) for word in text.split()] for text in texts]

  def decode(self, ids: Sequence[int]) -> str:
    """The text of these numbers."""
    return " ".join(map(str, ids))


@dataclasses.dataclass(frozen=True)
class Translation:
  """A model and what it translates."""

  case: Case
  params: Any
  sources: Sources  # longest first, without end tokens

  def ours(self, **options: Any) -> Translate:
    """A call of our translator."""
    numbers: Any = Numbers()
    batch = BatchConfig(tokens=ROWS * PADDED, buckets=(PADDED,))
    data: Any = types.SimpleNamespace(
      source_tokenizer=numbers, target_tokenizer=numbers, batch=batch
    )
    translator = Translator(data, dataclasses.replace(DECODE, **options))
    model, params = self.case.task().model, jax.device_put(self.params)
    texts = [numbers.decode(source) for source in self.sources]
    return lambda: [best[0].tokens.tolist() for best in translator(model, params, texts)]

  def theirs(self, **options: Any) -> Translate:
    """A call of Hugging Face's `generate`."""
    import torch

    marian = to_marian(self.params, self.case.model, self.case.source_vocab, self.case.target_vocab)
    ids = torch.full((len(self.sources), len(self.sources[0]) + 1), PAD)
    for row, source in enumerate(self.sources):
      ids[row, : len(source) + 1] = torch.tensor([*source, EOS])
    options |= {"max_length": MOST + 1, "do_sample": False, "suppress_tokens": list(NEVER)}

    def run() -> list[list[int]]:
      with torch.no_grad():
        tokens = marian.generate(ids, attention_mask=(ids != PAD).long(), **options)
      return [_until_end(row[1:].tolist()) for row in tokens]

    return run

  def ctranslate2(self, kind: str, threads: int, beams: int) -> Translate:
    """A call of CTranslate2's."""
    from benchmarks import peer_ctranslate2

    sizes = self.case.source_vocab, self.case.target_vocab
    marian = to_marian(self.params, self.case.model, *sizes)
    run = peer_ctranslate2.translation(marian, kind, threads, beams=beams, most=MOST)
    sources = [[*source, EOS] for source in self.sources]
    return lambda: [_until_end(tokens) for tokens in run(sources)]


def _until_end(tokens: list[int]) -> list[int]:
  """The tokens up to the end token, or before padding."""
  if EOS in tokens:
    return tokens[: tokens.index(EOS) + 1]
  return tokens[: tokens.index(PAD)] if PAD in tokens else tokens


def translation_case(case: Case, count: int, stop: float) -> Translation:
  """Random sources, and weights with which some translations end by themselves."""
  random = np.random.default_rng(0)
  lengths = random.integers(12, PADDED, count)
  sources = [random.integers(4, case.source_vocab, n).tolist() for n in sorted(lengths)[::-1]]
  return Translation(case, peaked(case.params(), case.model, spread=4.0, stop=stop), sources)


class Group(NamedTuple):
  """Calls that do the same.

  Attributes:
    name: what they do.
    runs: the calls, by library.
    amount: of `unit` that each does.
    unit: sentences or tokens.
    target: of our speed beside Hugging Face's.
    beside: of our speed beside CTranslate2's.
    tokens: that each produces.
  """

  name: str
  runs: common.Runs
  amount: int
  unit: str
  target: dict[str, float]
  beside: dict[str, float]
  tokens: dict[str, int]

  def measure(self, report: common.Report, rounds: int) -> None:
    """Times the calls, which have run before."""
    name, rest = self.name, {"amount": self.amount, "unit": self.unit, "warm_up": 0}
    seconds = report.measure(name, self.runs, rounds, **rest)
    rates = (f"{key} {n / np.median(seconds[key]):.0f}" for key, n in self.tokens.items())
    report.note(f"{name}, tokens a second: {', '.join(rates)}")
    speed, plain, theirs = f"{name}: our speed", seconds[OURS], seconds[HUGGING_FACE]
    report.claim(f"{speed} / {HUGGING_FACE}'s", theirs, plain, **self.target)
    report.claim(f"{speed} / {FLOAT32}'s", seconds[FLOAT32], plain, **self.beside)
    for other in (HUGGING_FACE, FLOAT32, INT8):
      claim = f"{speed} with bfloat16 products / {other}'s"
      report.claim(claim, seconds[other], seconds[ROUNDED])


def translation(report: common.Report, one: Translation, beams: int) -> Group:
  """Greedy or beam search, outputs compared."""
  threads, ours = report.machine["cores"], {} if beams > 1 else {"method": "greedy"}
  name = f"translation, {f'{beams} beams' if beams > 1 else 'greedy'}"
  theirs = {"num_beams": beams, **({"early_stopping": True} if beams > 1 else {})}
  runs = {
    OURS: one.ours(**ours),
    ROUNDED: one.ours(**ours, products="bfloat16"),
    HUGGING_FACE: one.theirs(**theirs),
    FLOAT32: one.ctranslate2("float32", threads, beams),
    INT8: one.ctranslate2("int8", threads, beams),
  }
  found = _found(report, name, runs)
  count, lengths = len(one.sources), [len(tokens) for tokens in found[OURS]]
  ended = [row for row, length in enumerate(lengths) if length < MOST]
  report.note(f"{name}: {count} translations of {np.mean(lengths):.1f} tokens, {len(ended)} end")
  for library in list(runs)[1:]:
    same = sum(found[OURS][row] == found[library][row] for row in ended)
    report.note(f"{name}: {library} finds {same} of our {len(ended)} translations that end")
    if library == HUGGING_FACE and same < 0.8 * len(ended):
      raise RuntimeError("the two searches do not find the same")
  peer, engine = ({"at_least": 3.0}, {"at_least": 0.8}) if beams > 1 else ({}, {})
  tokens = {library: sum(map(len, texts)) for library, texts in found.items()}
  return Group(name, runs, count, "sentences", peer, engine, tokens)


def _found(report: common.Report, name: str, runs: common.Runs) -> dict[str, Any]:
  """What every call returns; afterwards they are warm."""
  found = {}
  for library, run in runs.items():
    found[library] = run()
    report.say(f"{name}: {library} is warm")
  return found


def generation(report: common.Report, m: nemot.Models, rows: int) -> Group:
  """Greedy generation after prompts, outputs compared."""
  from benchmarks import peer_ctranslate2

  case, runs = m.ours.case, dict[str, Callable[[], np.ndarray]]()
  prompts, new, threads = case.prompts(rows), case.new, report.machine["cores"]
  runs[OURS] = m.ours.generation(rows)
  runs[ROUNDED] = m.ours.generation(rows, rounded)
  runs[HUGGING_FACE] = m.theirs.generation(rows)
  for library in (FLOAT32, INT8):
    kind = library.split(" ")[1]
    run = peer_ctranslate2.generation(m.theirs.model, kind, threads, end=nemot.END)
    runs[library] = functools.partial(run, prompts, new)
  name = f"generation of {new} tokens, {rows} text{'s' if rows > 1 else ''}"
  found = {library: made[:, : new - 1] for library, made in _found(report, name, runs).items()}
  for library in list(runs)[1:]:
    same = int(np.sum(np.all(found[OURS] == found[library], axis=1)))
    report.note(f"{name}: {library} generates {same} of our {rows} texts")
    if library == HUGGING_FACE and same < rows:
      raise RuntimeError("the two GPT-2s do not generate the same")
  tokens = dict.fromkeys(runs, rows * new)
  return Group(name, runs, rows * new, "tokens", {"at_least": 3.5}, {}, tokens)


def main() -> None:
  parser = common.options(__doc__, devices=("cpu",))
  parser.add_argument("--only", choices=PARTS, help="this part alone")
  parser.add_argument("--rounds", type=int, default=ROUNDS, help="alternations")
  options = parser.parse_args()
  report, groups = common.start("Decoding beside Hugging Face and CTranslate2", options), []
  parts = (options.only,) if options.only else PARTS
  if set(parts) & {"beams", "greedy"}:
    thin = {"encoder_layers": 1, "decoder_layers": 1} if options.quick else {}
    model = dataclasses.replace(RECIPE, max_length=80, **thin)
    case = Case("recipe", model, ROWS, PADDED, *((1000, 1000) if options.quick else ()))
    one = translation_case(case, 16 if options.quick else ROWS, STOP)
    names = {"beams": 5, "greedy": 1}
    groups += [translation(report, one, beams) for part, beams in names.items() if part in parts]
  if "generation" in parts:
    quick = nemot.Case(layers=1, dim=128, heads=2, vocab=1000, rows=4, length=64, new=16)
    models = nemot.models(quick if options.quick else nemot.Case())
    groups += [generation(report, models, rows) for rows in nemot.BATCHES]
  report.say("all are warm")
  for group in groups:
    group.measure(report, options.rounds)
  report.finish()


if __name__ == "__main__":
  main()
