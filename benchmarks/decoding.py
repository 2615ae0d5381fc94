"""Decoding beside Hugging Face and CTranslate2, the same random weights in all three, in one run.

    python -m benchmarks.decoding [--quick] [--json FILE] [--check]

Needs the environment of `make test-peers`. CPU. Translation: the thesis's model (6 + 6 layers of
width 512, as Marian has them), sentences of 6 to 40 tokens whose translations end by themselves or
at 1.5 times their source's length and 10; greedily and with 5 beams. All sort sentences by length
and take them in batches; Hugging Face searches a batch until its last sentence is done, CTranslate2
and we go on with fewer. Generation: a decoder shaped as GPT-2, 6 layers of width 384, 64 tokens
after prompts of 128, greedily.

float32; besides, our products of operands rounded to bfloat16 (`products="bfloat16"`), and
CTranslate2's int8. Outputs are compared. In full about 10 minutes on 2 cores.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common, nemot
from benchmarks.marian import peaked, to_marian
from benchmarks.transformer import RECIPE
from benchmarks.translation_case import Case
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.tokenizers import BOS, EOS, PAD, UNK
from compmod_jax.decoding import DecodeConfig
from compmod_jax.decoding.rounding import rounded
from compmod_jax.tasks.translator import Translator

ROUNDS = 10
ROWS = 32
NEVER = (PAD, BOS, UNK)
DECODE = DecodeConfig(beams=5)
HUGGING_FACE, OURS, ROUNDED = "Hugging Face", "ours", "ours, bfloat16 products"
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

  def limit(self, length: int) -> int:
    """Most tokens of a translation, of a source with its end token."""
    config = self.case.model
    return min(int(DECODE.max_ratio * length) + DECODE.max_extra, config.max_length)

  def ours(self, **options: Any) -> Translate:
    """A call of our translator."""
    numbers: Any = Numbers()
    batch = BatchConfig(tokens=ROWS * 32, buckets=(16, 24, 32, 48))
    data: Any = types.SimpleNamespace(
      source_tokenizer=numbers, target_tokenizer=numbers, batch=batch
    )
    translator = Translator(data, dataclasses.replace(DECODE, **options))
    model, params = self.case.task().model, jax.device_put(self.params)
    texts = [numbers.decode(source) for source in self.sources]
    return lambda: [best[0].tokens.tolist() for best in translator(model, params, texts)]

  def theirs(self, **options: Any) -> Translate:
    """A call of Hugging Face's `generate`, batch by batch."""
    import torch

    marian = to_marian(self.params, self.case.model, self.case.source_vocab, self.case.target_vocab)

    def run() -> list[list[int]]:
      found: list[list[int]] = []
      for start in range(0, len(self.sources), ROWS):
        part = [[*source, EOS] for source in self.sources[start : start + ROWS]]
        ids = torch.full((len(part), len(part[0])), PAD)
        for row, source in enumerate(part):
          ids[row, : len(source)] = torch.tensor(source)
        with torch.no_grad():
          tokens = marian.generate(
            ids,
            attention_mask=(ids != PAD).long(),
            length_penalty=1.0,
            max_length=self.limit(len(part[0])) + 1,
            suppress_tokens=list(NEVER),
            do_sample=False,
            **options,
          )
        found += [_until_end(row[1:].tolist()) for row in tokens]
      return found

    return run

  def ctranslate2(self, kind: str, threads: int, beams: int) -> Translate:
    """A call of CTranslate2's."""
    from benchmarks.peer_ctranslate2 import translation

    sizes = self.case.source_vocab, self.case.target_vocab
    marian = to_marian(self.params, self.case.model, *sizes)
    run = translation(marian, kind, threads, beams=beams, limits=self.limit)
    sources = [[*source, EOS] for source in self.sources]
    return lambda: [_until_end(tokens) for tokens in run(sources)]


def _until_end(tokens: list[int]) -> list[int]:
  """The tokens up to the end token, or before padding."""
  if EOS in tokens:
    return tokens[: tokens.index(EOS) + 1]
  return tokens[: tokens.index(PAD)] if PAD in tokens else tokens


def translation_case(case: Case, count: int, stop: float) -> Translation:
  """Random sources, log-normal in length, and weights whose translations end by themselves."""
  random = np.random.default_rng(0)
  lengths = np.clip(np.round(random.lognormal(np.log(18), 0.45, count)), 6, 40).astype(int)
  sources = [random.integers(4, case.source_vocab, n).tolist() for n in sorted(lengths)[::-1]]
  return Translation(case, peaked(case.params(), case.model, spread=4.0, stop=stop), sources)


def translate(report: common.Report, one: Translation, rounds: int) -> None:
  """Greedy and beam search, all libraries in turn."""
  threads = report.machine["cores"]
  for beams, target in ((5, True), (1, False)):
    ours = {} if beams > 1 else {"method": "greedy"}
    name = f"translation, {f'{beams} beams' if beams > 1 else 'greedy'}"
    theirs = {"num_beams": beams, **({"early_stopping": True} if beams > 1 else {})}
    runs = {
      OURS: one.ours(**ours),
      ROUNDED: one.ours(**ours, products="bfloat16"),
      HUGGING_FACE: one.theirs(**theirs),
      "CTranslate2 float32": one.ctranslate2("float32", threads, beams),
      "CTranslate2 int8": one.ctranslate2("int8", threads, beams),
    }
    found = {library: run() for library, run in runs.items()}
    count, lengths = len(one.sources), [len(tokens) for tokens in found[OURS]]
    report.note(
      f"{name}: {sum(lengths)} tokens in {count} translations, {min(lengths)} to {max(lengths)}"
    )
    for library in list(runs)[1:]:
      same = sum(a == b for a, b in zip(found[OURS], found[library], strict=True))
      report.note(f"{name}: {library} finds {same} of our {count} translations")
      if library == HUGGING_FACE and same < 0.8 * count:
        raise RuntimeError("the two searches do not find the same")
    seconds = report.measure(name, runs, rounds, amount=count, unit="sentences", warm_up=1)
    report.note(
      f"{name}, tokens a second: "
      + ", ".join(f"{n} {sum(map(len, found[n])) / np.median(s):.0f}" for n, s in seconds.items())
    )
    _claims(report, name, seconds, {"at_least": 3.0} if target else {}, target)


def _claims(
  report: common.Report,
  name: str,
  seconds: dict[str, np.ndarray],
  target: dict[str, float],
  against_both: bool,
) -> None:
  """How fast we are beside the others."""
  speed = f"{name}: our speed"
  report.claim(f"{speed} / {HUGGING_FACE}'s", seconds[HUGGING_FACE], seconds[OURS], **target)
  best = "CTranslate2 float32"
  both = {"at_least": 0.8} if against_both else {}
  report.claim(f"{speed} / {best}'s", seconds[best], seconds[OURS], **both)
  for other in (HUGGING_FACE, best, "CTranslate2 int8"):
    report.claim(f"{speed} with bfloat16 products / {other}'s", seconds[other], seconds[ROUNDED])


def generate(report: common.Report, case: nemot.Case, rounds: int) -> None:
  """Greedy generation after prompts."""
  from benchmarks.peer_ctranslate2 import generation

  m, new = nemot.models(case), case.new
  for rows in nemot.BATCHES:
    prompts = case.prompts(rows)
    runs: dict[str, Callable[[], np.ndarray]] = {
      OURS: m.ours.generation(rows),
      ROUNDED: m.ours.generation(rows, rounded),
      HUGGING_FACE: m.theirs.generation(rows),
    }
    for kind in ("float32", "int8"):
      run = generation(m.theirs.model, kind, report.machine["cores"], end=nemot.END)
      runs[f"CTranslate2 {kind}"] = functools.partial(run, prompts, new)
    name = f"generation of {new} tokens, {rows} rows" if rows > 1 else f"generation of {new} tokens"
    found = {library: run()[:, : new - 1] for library, run in runs.items()}
    for library in list(runs)[1:]:
      same = int(np.sum(np.all(found[OURS] == found[library], axis=1)))
      report.note(f"{name}: {library} generates {same} of our {rows} texts")
      if library == HUGGING_FACE and same < rows:
        raise RuntimeError("the two GPT-2s do not generate the same")
    seconds = report.measure(name, runs, rounds, amount=rows * new, unit="tokens", warm_up=1)
    _claims(report, name, seconds, {"at_least": 3.5}, False)


def main() -> None:
  parser = common.options(__doc__, devices=("cpu",))
  parser.add_argument("--only", choices=("translation", "generation"), help="this part alone")
  parser.add_argument("--rounds", type=int, default=ROUNDS, help="alternations")
  options = parser.parse_args()
  report = common.start("Decoding beside Hugging Face and CTranslate2", options)
  if options.only != "generation":
    thin = dataclasses.replace(RECIPE, encoder_layers=1, decoder_layers=1, max_length=80)
    case = Case("recipe", dataclasses.replace(RECIPE, max_length=80), ROWS, 32)
    quick = Case("thin", thin, ROWS, 32, 1000, 1000)
    one = translation_case(quick, 24, STOP) if options.quick else translation_case(case, 96, STOP)
    translate(report, one, options.rounds)
  if options.only != "translation":
    quick = nemot.Case(layers=1, dim=128, heads=2, vocab=1000, rows=4, length=64, new=16)
    generate(report, quick if options.quick else nemot.Case(), options.rounds)
  report.finish()


STOP = -1.0


if __name__ == "__main__":
  main()
