"""Figures of README and docs are those of the files in `results/`; every table is accounted for.

`TABLES` has an entry for every Markdown table: a function that makes its rows from files, or a
reason why it has none. In a row, None is a cell that no file has; ... as the last row stands for
any number of rows that no file has. `SENTENCES` are sentences whose
figures come from files; the sentence is made from the file and must stand on the page.
"""

import csv
import functools
import itertools
import json
import math
import re
import statistics
from pathlib import Path

import pytest

from compmod_jax.data.synthetic.lengths import LengthData
from compmod_jax.data.synthetic.scan import ScanData
from compmod_jax.metrics.significance import detectable, holm, mean_interval, paired_test
from compmod_jax.tables import overview
from compmod_jax.tables.registry import table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
# Where the cells of nemot-3.7 are that docs/nemot.md shows.
WORLDS = "nemot-3.7/tiny"
BASELINES = (
  "chance",
  "most frequent",
  "question only",
  "last sentence",
  "latest",
  "sliding window",
  "window and distance",
  "logistic regression",
)


# Pages.


@functools.cache
def tables_of(page):
  """(heading, number under that heading) -> rows of a table's body, each a list of cells."""
  found, heading, number, lines = {}, "", 0, []
  for line in [*page.read_text().splitlines(), ""]:
    if line.startswith("|"):
      lines.append([tidy(cell) for cell in line.strip().strip("|").split("|")])
      continue
    if lines:
      found[heading, number] = lines[2:]
      number, lines = number + 1, []
    if line.startswith("#"):
      heading, number = line.lstrip("# ").split(" (")[0].split(":")[0], 0
  return found


def tidy(text):
  return " ".join(text.replace("<br>", " ").replace("**", "").replace("`", "").split())


@functools.cache
def prose_of(page):
  return tidy((ROOT / page).read_text())


# Files.


@functools.cache
def record(path):
  return json.loads((RESULTS / path).read_text())


def split(path, name="test"):
  return next(row for row in record(path)["splits"] if row["split"] == name)


@functools.cache
def cells(folder):
  """row -> seed -> the record of a finished run of a table."""
  found = {}
  for path in sorted((RESULTS / folder).glob("*-seed*.json")):
    one = json.loads(path.read_text())
    found.setdefault(one["row"], {})[one["seed"]] = one
  return found


def seeds(folder, row, name, value):
  runs = cells(folder)[row]
  return [runs[seed]["scores"][name][value] for seed in sorted(runs)]


def interval(values, digits, *, sign=""):
  mean = mean_interval(values)
  half = "" if math.isnan(mean.half) else f" ± {mean.half:.{digits}f}"
  return f"{mean.mean:{sign}.{digits}f}{half}"


def listed(values, digits=1):
  """The values in a sentence."""
  *most, last = (f"{value:.{digits}f}" for value in values)
  return f"{', '.join(most)} and {last}"


def starred(folder, row, reference, name, value):
  """Whether a row differs from the reference after correction, as tables mark it."""
  rows = [other for other in cells(folder) if other != reference]
  plain = seeds(folder, reference, name, value)
  p = holm([paired_test(seeds(folder, other, name, value), plain).p for other in rows])
  return row != reference and p[rows.index(row)] <= 0.05


def lines_of(path):
  with open(RESULTS / path, newline="") as file:
    return list(csv.DictReader(file))


# README.


def grammar():
  rows = []
  for name, scored in (
    ("test (1,000)", "test"),
    ("combination: word pairs never met in training", "combination"),
    ("attractor: nouns of the other number before the verb", "attractor"),
    ("depth: one more nested relative clause", "depth"),
    ("length: 21 to 40 words", "length"),
  ):
    found = []
    for kind in ("cah", "plain"):
      runs = [split(f"grammar/{kind}-seed{seed}.json", scored) for seed in range(3)]
      exact = mean_interval([run["exact_match"] for run in runs]).mean
      found.append(f"{interval([run['bleu'] for run in runs], 1)} ({exact:.1f} %)")
    rows.append([name, *found, None, None])  # no file has the baselines
  return rows


def tatoeba():
  rows = []
  for name, kind in (("encoder self-attention", "cah"), ("nowhere (plain)", "plain")):
    path = f"tatoeba/{kind}-seed0.json"
    names = [row["split"] for row in record(path)["splits"] if row["split"] != "valid"]
    minutes = f"{record(path)['train_seconds'] / 60:.0f}"
    rows.append([name, *(with_interval(split(path, one)) for one in names), f"{minutes} of ..."])
  return rows


def speedrun():
  rows = []
  for kind in ("cah", "plain"):
    path = f"tatoeba/{kind}-seed0.json"
    minutes = f"{record(path)['train_seconds'] / 60:.0f}"
    rows.append([None, None, minutes, f"{split(path)['bleu']:.1f}", "one seed"])
  for kind in ("dropout-0.1", "cah", "plain"):
    paths = [f"speedrun/{kind}-seed{seed}.json" for seed in range(3)]
    minutes = ", ".join(f"{record(path)['train_seconds'] / 60:.1f}" for path in paths)
    scores = [split(path)["bleu"] for path in paths]
    each = ", ".join(f"{score:.2f}" for score in scores)
    rows.append([None, None, minutes, each, interval(scores, 2)])
  return rows


def speedrun_dropout():
  paths = {"0.1": "dropout-0.1-seed0", "0.05": "dropout-0.05-one-core-seed0"}
  rows = []
  for dropout, path in (paths | {"0": "dropout-0-one-core-seed0"}).items():
    found = split(f"speedrun/{path}.json", "valid")
    rows.append([dropout, f"{found['loss']:.3f}", f"{found['bleu']:.1f}"])
  return rows


def speedrun_screening():
  runs = record("speedrun/screening.json")["runs"]
  return [
    [
      run["optimizer"],
      f"{run['learning_rate']:.3f}",
      f"{run['tokens']:,}",
      f"{run['steps']:,}",
      f"{run['loss']:.3f}",
      f"{run['bleu']:.1f}",
    ]
    for run in runs
  ]


def with_interval(row, digits=1):
  low, high = row["bleu_low"], row["bleu_high"]
  return f"{row['bleu']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def scan():
  rows = []
  for name in ("simple", "addprim_jump", "length"):
    path = f"scan/{name}-seed0.json"
    found = split(path)
    minutes = record(path)["train_seconds"] / 60
    label = f"{name} ({found['sentences']:,}{' commands' if name == 'simple' else ''})"
    rows.append([label, f"{found['exact_match']:.1f} %", f"{minutes:.0f} minutes"])
  return rows


def ratio(file, name, digits=2):
  claims = {claim["name"]: claim["ratio"] for claim in record(f"benchmarks/{file}.json")["claims"]}
  found = claims[name]
  low, high = found["low"], found["high"]
  return f"{found['median']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def median(file, name):
  return ratio(file, name).split(" ")[0]


def fact(file, start):
  facts = record(f"benchmarks/{file}.json")["facts"]
  return next(fact.removeprefix(f"{start}: ") for fact in facts if fact.startswith(f"{start}: "))


def streams_speed():
  timings = record("benchmarks/streams-cpu.json")["timings"]

  def rates(signal):
    found = [timings[f"{signal}: {n} streams"] for n in (16, 32, 64, 128, 256)]
    return [f"{timing['rate']['median']:,.0f}" for timing in found]

  return [["plain", *rates("none")], ["surprisal", *rates("surprisal")]]


def ingredient_costs():
  claims = record("benchmarks/ingredients-cpu.json")["claims"]
  return [
    [claim["name"].removesuffix(" / plain"), ratio("ingredients-cpu", claim["name"])]
    for claim in claims
  ]


def cpu_attention():
  """A row for each size: times over those of one operation, and of PyTorch's."""
  claims = record("benchmarks/cpu-attention.json")["claims"]
  return [
    [
      case,
      *(
        ratio("cpu-attention", f"{case}, {what}: blocks / {other}")
        for other in ("as one", "PyTorch")
        for what in ("forward", "training")
      ),
    ]
    for case in dict.fromkeys(claim["name"].rsplit(", ", 1)[0] for claim in claims)
  ]


def chosen_attention():
  """A row for each case: times over those of all queries, and of a layer without competition."""
  cases = record("benchmarks/chosen-attention.json")["tables"]
  return [
    [
      case.removeprefix("rows of "),
      *(
        ratio("chosen-attention", f"{case}, {what}: chosen / {other}")
        for other in ("all", "plain")
        for what in ("forward", "training")
      ),
    ]
    for case in cases
  ]


def transformer_speed():
  names = (
    "small model, 128 x 16: our time / PyTorch eager's",
    "recipe, 64 x 32: our time / PyTorch eager's",
    "recipe, 64 x 32: encoder heads compete / plain",
    "recipe, 64 x 32: all heads compete / plain",
    "recipe, 32 sentences, beam 5: our speed / theirs",
  )
  return [[None, ratio("transformer-cpu", name)] for name in names]


def bare_products():
  """A row for each product of the recoding and decoder benchmarks, in GFLOP/s."""
  rows = []
  for file in ("recoding-cpu", "nemot-cpu"):
    timings = record(f"benchmarks/{file}.json")["timings"]
    for name in (one.removesuffix(": JAX") for one in timings if one.endswith(": JAX")):
      rates = (timings[f"{name}: {by}"]["rate"]["median"] for by in ("JAX", "PyTorch"))
      sizes = name.removeprefix("product of ")
      rows.append(
        [sizes, *(f"{rate:.0f}" for rate in rates), median(file, f"{name}: JAX's time / PyTorch's")]
      )
  return rows


def speed_in_short():
  step, search = "transformer-training-cpu", "translation, 5 beams: our speed"
  recoding = "recoding-cpu"
  return [
    [None, ratio(step, "recipe, 64 x 32: our time / PyTorch eager's")],
    [None, ratio(step, "recipe, 64 x 32: all heads compete / plain")],
    [None, ratio("decoding-cpu", f"{search} / Hugging Face's")],
    [None, ratio("decoding-cpu", f"{search} / CTranslate2 float32's")],
    [None, ratio(recoding, "training: ours / PyTorch, plain")],
    [None, ratio(recoding, "training: surprisal / plain")],
    [None, ratio("nemot-cpu", "training: our GPT-2's time / Hugging Face eager's")],
  ]


def decoding_speed():
  ratios = (
    "our speed / Hugging Face's",
    "our speed / CTranslate2 float32's",
    "our speed with bfloat16 products / Hugging Face's",
    "our speed with bfloat16 products / CTranslate2 float32's",
    "our speed with bfloat16 products / CTranslate2 int8's",
  )
  return [[None, ratio("decoding-cpu", f"translation, 5 beams: {name}")] for name in ratios]


def experts_speed():
  return [
    [None, *(ratio("experts-cpu", f"{way}: {name}") for way in ("forward", "training"))]
    for name in ("dense / plain", "top-2 / dense")
  ]


def recoding_speed():
  file, counts = "recoding-cpu", (1, 4, 8)
  entropies = [median(file, f"evaluation: entropy of {n} / plain") for n in counts]
  floors = [fact(file, f"floor by arithmetic, entropy of {n}") for n in counts]
  return [
    [
      "evaluation, surprisal",
      ratio(file, "evaluation: surprisal / plain"),
      ratio(file, "evaluation: PyTorch surprisal / plain"),
      fact(file, "floor by arithmetic, evaluation"),
    ],
    [
      "the same, of the top layer alone",
      ratio(file, "evaluation: surprisal, top layer / plain"),
      "",
      fact(file, "floor by arithmetic, evaluation, top layer"),
    ],
    [
      "evaluation, surprisal, in 256 streams",
      ratio(file, "evaluation, 256 streams: surprisal / plain"),
      "",
      fact(file, "floor by arithmetic, evaluation"),
    ],
    ["evaluation, entropy of 1, 4, 8 samples", ", ".join(entropies), "", ", ".join(floors)],
    [
      "training, surprisal",
      ratio(file, "training: surprisal / plain"),
      ratio(file, "training: PyTorch surprisal / plain"),
      fact(file, "floor by arithmetic, training"),
    ],
    [
      "training, gradients through recoding",
      ratio(file, "training: surprisal, through / plain"),
      "",
      fact(file, "floor by arithmetic, training through"),
    ],
  ]


def nemot_speed():
  names = (
    "training: gated / not gated",
    "training: our GPT-2's time / Hugging Face eager's",
    "generation, 1 x 64: our GPT-2's speed / Hugging Face's",
    "generation, 16 x 64: our GPT-2's speed / Hugging Face's",
    "training: NeMoT / GPT-2, both ours",
  )
  return [[None, ratio("nemot-cpu", name)] for name in names]


# docs/few_shot.md.


def few_shot():
  rows = []
  for label, file in (("prototypes", "prototypes-seed0"), ("MAML", "maml-seed0")):
    found = split(f"few-shot/{file}.json")
    row = [label, share_interval(found)]
    row.append(share_interval(found["parts"], "20_way/") if "parts" in found else "")
    rows.append([*row, f"{record(f'few-shot/{file}.json')['train_seconds'] / 60:.1f} minutes"])
  (many,) = cells("few-shot/20way")["MAML"].values()
  minutes = f"{many['train_seconds'] / 60:.1f} minutes"
  return [*rows, ["MAML, 20 classes", "", share_interval(many["scores"]["test"]), minutes]]


# docs/leopard.md.

LEOPARD = "leopard/tiny"


def sentences_by_property():
  rows = []
  for method in ("fine-tuning", "LEOPARD", "prototypes", "MAML", "black box"):
    runs = cells(LEOPARD)[method].values()
    row = [method, str(len(runs))]
    for part, value in (
      *(("test", f"{shots}accuracy") for shots in ("4_shot/", "", "16_shot/")),
      ("valid", "accuracy"),
    ):
      row.append(interval([100 * run["scores"][part][value] for run in runs], 1))
    minutes = sorted(round(run["train_seconds"] / 60) for run in runs)
    rows.append([*row, f"{minutes[0]} to {minutes[-1]}"])
  return rows


def leopard_differences():
  one, other = (
    [seeds(LEOPARD, method, "test", f"{shots}accuracy") for shots in ("4_shot/", "", "16_shot/")]
    for method in ("LEOPARD", "fine-tuning")
  )
  differences = [
    interval([100 * (a - b) for a, b in zip(mine, theirs, strict=True)], 1, sign="+")
    for mine, theirs in zip(one, other, strict=True)
  ]
  yield "{}, {} and {} points with 4, 8 and 16 examples".format(*differences)


def raw_examples():
  five, twenty = record("few-shot/baselines.json")["rows"]
  assert (five["ways"], twenty["ways"], five["episodes"]) == (5, 20, 600)
  yield f"right for {100 * five['accuracy']:.1f} % of the queries, 5-way"
  yield f"for {100 * twenty['accuracy']:.1f} %, 20-way"


def share_interval(found, prefix=""):
  names = ("accuracy", "accuracy_low", "accuracy_high")
  value, low, high = (f"{100 * found[prefix + name]:.2f}" for name in names)
  return f"{value} [{low}, {high}]"


# docs/plasticity.md and docs/rims.md.


def associations():
  rows = []
  for label, row in (
    ("network", "network"),
    ("lstm", "LSTM"),
    ("hebbian", "hebbian"),
    ("(none): simple modulation", "simple"),
    ("retroactive", "retroactive"),
    ("plastic-lstm", "plastic LSTM"),
  ):
    found = [label]
    for name in ("pairs_4", "pairs_6"):
      shares = [100 * share for share in seeds("cues/tiny", row, name, "accuracy")]
      star = " *" if starred("cues/tiny", row, "network", name, "accuracy") else ""
      found.append(interval(shares, 2) + star)
    rows.append(found)
  return rows


def longer_associations():
  found = [
    interval(
      [100 * split(f"cues/longer/network-seed{s}.json", name)["accuracy"] for s in range(3)], 2
    )
    for name in ("pairs_4", "pairs_6")
  ]
  yield f"the plain network has {found[0]} and {found[1]} over 3 seeds."


def specialisation():
  runs = functools.partial(seeds, "competing_experts/tiny", "experts", "test")
  whole, own = runs("experts/all_specialised"), runs("experts/specialised")
  yield f"{sum(whole):.0f} of {len(whole)} runs end with an expert for every transformation"
  yield f"{interval(own, 1)} of the ten transformations have one"
  before, after = runs("experts/transformed_loss"), runs("experts/restored_loss")
  yield f"falls from {statistics.mean(before):.4f} to {interval(after, 4)}"
  runs = functools.partial(seeds, "competing_experts/tiny", "balanced", "test")
  whole, own = runs("experts/all_specialised"), runs("experts/specialised")
  yield f"{sum(whole):.0f} of {len(whole)} runs do: {interval(own, 1)} transformations have an"
  yield f"the difference falls to {interval(runs('experts/restored_loss'), 4)}"


META_ROUTERS, TIM = "meta_routers/tiny", "tim/tiny"


def meta_routers(measure, digits):
  names = ("test", "combination", "attractor", "depth", "length")
  return shown_rows(META_ROUTERS, [(f"{measure} {name}", digits) for name in names])


def shown_rows(folder, columns):
  """Rows of a table: the mean of each column with half its interval, and * where it differs."""
  lines = {(line["row"], line["column"]): line for line in lines_of(f"{folder}/numbers.csv")}
  rows = []
  for row in dict.fromkeys(row for row, _ in lines):
    shown = [row]
    for column, digits in columns:
      line = lines[row, column]
      mean, half = float(line["mean"]), (float(line["high"]) - float(line["low"])) / 2
      star = "*" if line["corrected p"] and float(line["corrected p"]) <= 0.05 else ""
      shown.append(f"{mean:.{digits}f} ± {half:.{digits}f}{star}")
    rows.append(shown)
  return rows


DECODER_ALONE = "decoder alone, convolution, scratchpad"
ADDED = "relative, added primitives, scratchpad"
BEST = (
  ("scan_mcd1-3000-steps", "relative, scratchpad", "test", "97.8 (5 % of the data)"),
  ("scan_mcd2-3000-steps", "relative, scratchpad", "test", ""),
  ("scan_mcd3-3000-steps", "relative, scratchpad with separators", "test", ""),
  ("scan_length_26-3000-steps", "relative, scratchpad", "test", "100"),
  ("scan_length-3000-steps", "relative, sliding window, scratchpad", "test", "20"),
  ("scan_around_right-3000-steps", f"{ADDED} with what follows", "test", "97.6"),
  ("scan_jump-5000-steps", f"{ADDED} with separators", "test", "98"),
  ("copy-3000-steps", "relative, index hints", "longer_2", ""),
  ("copy-3000-steps", "relative, index hints", "longer_3", ""),
  ("reverse", "relative, index hints", "longer_2", ""),
  ("reverse", "relative, index hints", "longer_3", ""),
  ("addition-3000-steps", "relative, index hints, scratchpad", "longer_2", ""),
  ("addition-3000-steps", "relative, index hints, scratchpad", "longer_3", ""),
  ("cogs-3000-steps", "relative", "held_out", ""),
  ("pcfg_systematicity-10000-steps", DECODER_ALONE, "test", "96"),
  ("pcfg_productivity-7000-steps", DECODER_ALONE, "test", "85"),
  ("arithmetic", "near words, scratchpad", "deeper", "98"),
  ("table_lookup", "neural data router", "deeper", "100"),
  ("table_lookup", "near words, blanks, scratchpad", "deeper", "100"),
  ("table_lookup_forward", "near words, blanks, scratchpad", "deeper", "100"),
)
"""Folder, row and part of what reached most, and the published figure."""


def best_of_data():
  rows = []
  for folder, row, part, published in BEST:
    runs = [one for _, one in sorted(cells(f"generalisation/{folder}")[row].items())]
    steps = f"{runs[0]['experiment']['phases'][0]['steps']:,}"
    shown = ", ".join(f"{one['scores'][part]['exact_match']:.1f}" for one in runs)
    minutes = ", ".join(f"{one['train_seconds'] / 60:.0f}" for one in runs)
    data = re.sub(r"-\d+-steps$", "", folder)
    rows.append([data, part, published, shown, row, steps, minutes])
  return rows


def rows_side_by_side():
  """A row for each model on data whose only part is the test."""

  def spec(scale):
    return table("generalisation", scale, 4)

  parts = overview.parts(overview.collect(RESULTS / "generalisation", spec))
  (part,) = [one for one in parts if "scan_jump" in one.scales]
  return overview.lines(part)[1:]


def generalised(data, parts):
  """A row for each run on data sets whose names begin so: exact match, and minutes of training."""
  rows = []
  for folder in sorted((RESULTS / "generalisation").glob(f"{data}_*")):
    if folder.name.startswith("scan_length_search"):
      continue
    for row, runs in sorted(cells(f"generalisation/{folder.name}").items()):
      for seed, one in sorted(runs.items()):
        scores, minutes = one["scores"], one["train_seconds"] / 60
        shown = [f"{scores[part]['exact_match']:.1f}" for part in parts]
        steps = f"{one['experiment']['phases'][0]['steps']:,}"
        name = re.sub(r"-\d+-steps$", "", folder.name)
        rows.append([name, steps, row, str(seed), *shown, f"{minutes:.0f}"])
  return rows


COMPETING = {"1": "competition/published", "their number": "competition/rescaled"}


def less_competing(weights, split):
  """BLEU of models all of whose heads compete less that of those without, seed by seed."""
  score = (split, "bleu")
  plain = seeds("competition/rescaled", "pre-norm, 4 heads, none", *score)
  competing = seeds(COMPETING[weights], "pre-norm, 4 heads, all", *score)
  return [a - b for a, b in zip(competing, plain, strict=True)]


def trial_of_competition():
  """A row for each way to compete, and one for its difference from none: BLEU of every split."""
  splits, rows = ("test", "combination", "attractor", "depth", "length"), []
  for row, weights, folder in (
    ("none", "", "competition/rescaled"),
    *(("all", *one) for one in COMPETING.items()),
  ):
    name = f"pre-norm, 4 heads, {row}"
    shown = (interval(seeds(folder, name, split, "bleu"), 1) for split in splits)
    minutes = [one["train_seconds"] / 60 for one in cells(folder)[name].values()]
    rows.append([row, weights, *shown, f"{min(minutes):.0f} to {max(minutes):.0f}"])
  for weights in COMPETING:
    shown = (interval(less_competing(weights, split), 1, sign="+") for split in splits)
    rows.append(["all less none", weights, *shown, ""])
  return rows


def screening_of_competition():
  """Other norms, heads and places: BLEU less that of the plain model beside it, seed by seed."""
  splits, rows = ("test", "combination", "attractor", "depth", "length"), []
  for norm, heads in itertools.product(("pre", "post"), (4, 8)):
    plain = cells("competition/rescaled").get(f"{norm}-norm, {heads} heads, none", {})
    for place, (weights, folder) in itertools.product(("enc", "dec+x", "all"), COMPETING.items()):
      name = f"{norm}-norm, {heads} heads, {place}"
      found = cells(folder).get(name, {})
      if found and (norm, heads, place) != ("pre", 4, "all"):
        shown = (
          ", ".join(
            f"{found[seed]['scores'][split]['bleu'] - plain[seed]['scores'][split]['bleu']:+.1f}"
            for seed in sorted(found)
          )
          for split in splits
        )
        rows.append([f"{norm}-norm, {heads} heads", place, weights, *shown])
  return rows


def trial_in_short():
  """Which differences of the trial stand after correction for all ten, and what could be found."""
  found = {
    (weights, split): less_competing(weights, split)
    for weights in COMPETING
    for split in ("test", "combination", "attractor", "depth", "length")
  }
  p = holm([paired_test(values, [0.0] * len(values)).p for values in found.values()])
  differ = [one for one, value in zip(found, p, strict=True) if value <= 0.05]
  assert differ == [("1", "test"), ("1", "combination"), ("1", "depth")]
  yield f"(p at most {max(value for value in p if value <= 0.05):.3f})"
  spread = statistics.stdev(found["their number", "test"])
  yield f"finds a difference of {detectable(spread, 5):.1f} BLEU on the test in four of five"
  plain, enc = (
    seeds("competition/tatoeba", row, "test", "bleu")
    for row in ("none", "enc, weights of heads sum to their number")
  )
  yield f"have {listed(plain)} BLEU on the test (seeds 0 to {len(plain) - 1})"
  yield f"sum to the number of heads, {listed(enc)} (seeds 0 to {len(enc) - 1})"


def searched():
  """A row for each setting of SCAN's lengths: exact match on longer training commands."""
  found = cells("generalisation/scan_length_search-3000-steps")
  return [
    [
      row,
      f"{runs[0]['scores']['valid']['exact_match']:.1f}",
      f"{runs[0]['train_seconds'] / 60:.0f}",
    ]
    for row, runs in sorted(
      found.items(), key=lambda one: one[1][0]["scores"]["valid"]["exact_match"]
    )
  ]


def composed_tables():
  """A row for each number of repetitions in training and in use: exact match by part."""
  rows = []
  for repetitions in (8, 14):
    found = record(f"systematic/table_lookup-router-{repetitions}.json")["splits"]
    rows.append(["8", str(repetitions), *(f"{one['exact_match']:.1f}" for one in found)])
  more = record("systematic/table_lookup-router-trained-with-12.json")
  assert more["experiment"]["model"]["encoder_layers"] == 12
  parts = ("test", "composition", "deeper_valid", "deeper", "primitive")
  return [
    *rows,
    ["12", "12", *(f"{more['scores'][part]['exact_match']:.1f}" for part in parts)],
  ]


def tables_by_near_words():
  """A row for each scratchpad of composed tables with T5's bias of near distances."""
  tried = ("_forward-scratchpad-near-8", "_forward-scratchpad-near-5")
  tried += ("_forward-scratchpad-near-5-longer", "-scratchpad-near-5")
  found = [record(f"systematic/table_lookup{name}.json") for name in tried]
  for data in ("_forward-3000-steps", "_forward", "-3000-steps", ""):
    of_seed = cells(f"generalisation/table_lookup{data}")["near words, blanks, scratchpad"]
    found += [one for _, one in sorted(of_seed.items())]
  rows, parts = [], ("test", "composition", "deeper_valid", "deeper")
  for one in found:
    experiment = one["experiment"]
    assert experiment["optimizer"]["learning_rate"] == 0.002
    model, data = experiment["model"], experiment["task"]["data"]
    rows.append(
      [
        "last" if data["backward"] else "first",
        str(data.get("blanks", 0)),
        *(str(model[field]) for field in ("relative_buckets", "relative_distance")),
        f"{experiment['phases'][0]['steps']:,}",
        str(experiment["seed"]),
        *(f"{one['scores'][part]['exact_match']:.1f}" for part in (*parts, "primitive")),
        f"{one['train_seconds'] / 60:.0f}",
      ]
    )
  return rows


def nested_arithmetic():
  """A row for each form of the steps of arithmetic: what they reach, and what the run took."""
  near = [
    one
    for steps in ("-5000-steps", "")
    for _, one in sorted(
      cells(f"generalisation/arithmetic{steps}")["near words, scratchpad"].items()
    )
  ]
  before = [
    record(f"systematic/arithmetic-scratchpad-{name}.json")
    for name in ("without-own-number", "parts-when-closed")
  ]
  alone = cells("generalisation/arithmetic-3000-steps")[DECODER_ALONE]
  forms = (
    "bracket around each symbol",
    "the same, closed brackets named",
    *["what its bracket holds behind each symbol"] * len(near),
    *["the same, a decoder alone"] * len(alone),
  )
  rows = []
  runs = (*before, *near, *(one for _, one in sorted(alone.items())))
  for form, one in zip(forms, runs, strict=True):
    scores, positions = one["scores"], one["experiment"]["model"]["positions"]
    levels = [scores["deeper"][f"exact_match/depth/{n}"] for n in (7, 8)]
    shares = [scores[part]["exact_match"] for part in ("test", "deeper_valid", "deeper")]
    shown = [f"{share:.1f}" for share in (*shares[:2], *levels, shares[2])]
    steps = f"{one['experiment']['phases'][0]['steps']:,} steps"
    seed, minutes = str(one["experiment"]["seed"]), f"{one['train_seconds'] / 60:.0f}"
    rows.append([form, f"`{positions}`", steps, seed, *shown, minutes])
  return rows


def context_logic():
  """A row for each form of attention: R2 of every part."""
  found = cells("logic_in_context/small")
  return [
    [row, *(f"{found[row][0]['scores'][part]['r2']:.3f}" for part in ("valid", "test", "ood"))]
    for row in ("softmax", "HYLA")
  ]


def context_logic_in_seeds():
  """R2 of every part, mean over seeds, and its differences seed by seed."""
  folder, parts = "logic_in_context/paper-25000-steps", ("valid", "test", "ood")
  rows = [
    [row, *(interval(seeds(folder, row, part, "r2"), 3) for part in parts)]
    for row in ("softmax", "HYLA")
  ]
  less = (difference(folder, "HYLA", "softmax", part, "r2", 3) for part in parts)
  return [*rows, ["HYLA less softmax", *less]]


def context_logic_order():
  folder = "logic_in_context/paper-25000-steps"
  ahead = {
    part: sum(
      a > b
      for a, b in zip(*(seeds(folder, row, part, "r2") for row in ("HYLA", "softmax")), strict=True)
    )
    for part in ("test", "ood")
  }
  assert ahead == {"test": 4, "ood": 5}
  yield "it is ahead in four pairs of runs of five, on unseen terms (`ood`) in all five"
  unseen = [r2 for row in ("HYLA", "softmax") for r2 in seeds(folder, row, "ood", "r2")]
  (above,) = [r2 for r2 in unseen if r2 > 0]
  yield f"only one explains more there than the mean does (HYLA, {above:.1f})"


def string_edits():
  (edits,) = cells("generalisation/pcfg_systematicity-3000-steps")["relative"].values()
  alike, unseen = (edits["scores"][part] for part in ("iid", "test"))
  few = [f"{alike[f'exact_match/functions/{n}']:.0f}" for n in (1, 4)]
  yield f"{alike['exact_match']:.1f} % are right ({few[0]} of those with a single function"
  yield f"{few[1]} with four), of those with a pair of functions that training lacks"
  yield f"training lacks {unseen['exact_match']:.1f} %"
  before, after = (
    [one["scores"] for _, one in sorted(cells(folder)[DECODER_ALONE].items())]
    for folder in (f"generalisation/pcfg_systematicity-{n}-steps" for n in (7000, 10000))
  )
  ahead, behind = (f"{one['valid']['exact_match']:.1f}" for one in before)
  yield f"{behind} % of its validation sentences are right, {ahead} % of seed 0's"
  learned = listed([one["valid"]["exact_match"] for one in after])
  yield f"have {learned} % of their validation sentences right"
  tests = listed([one["test"]["exact_match"] for one in after])
  yield f"sentences right, and {tests} % of the test"
  to_strings = [
    cells(f"generalisation/pcfg_{name}-7000-steps")[DECODER_ALONE][0]["scores"]
    for name in ("systematicity", "productivity")
  ]
  again = [
    record(f"systematic/pcfg_{name}-redrawn.json")["splits"][0]
    for name in ("systematicity", "productivity")
  ]
  assert [(one["split"], one["sentences"]) for one in again] == [("test", 500)] * 2
  shares = [f"{one['exact_match']:.1f}" for one in again]
  yield f"of 500 sentences each that were drawn anew {shares[0]} and {shares[1]} % are right"
  for scores, name in zip(to_strings, ("systematicity", "productivity"), strict=True):
    words = ("1025-1536", "1537-2048", "2049-3072", "3073-4096")
    shares = [f"{scores['test'][f'exact_match/target_words/{n}']:.0f}" for n in words]
    yield f"{name}: {shares[0]}, {shares[1]}, {shares[2]} and {shares[3]} %"


def hinted_in_short():
  """How many sequences of `test` have the symbols of one of training, counted as they are drawn."""
  seen = {}
  for task in ("copy", "addition"):
    data = LengthData(task=task, hints=100)
    train, test = (
      [re.sub(r"#\d+ ?", "", source).strip() for source in data.load(part).source]
      for part in ("train", "test")
    )
    assert len(test) == 1000
    known = set(train)
    seen[task] = sum(source in known for source in test)
  yield f"{seen['copy']} of 1,000 copies and {seen['addition']} of 1,000 sums have"


def ingredients_in_short():
  (tables,) = cells("generalisation/table_lookup")["neural data router"].values()
  parts = ("test", "deeper_valid", "deeper", "composition", "primitive")
  shares = [f"{tables['scores'][part]['exact_match']:.1f}" for part in parts]
  yield f"seed 0, {tables['train_seconds'] / 60:.0f} minutes on one core"
  yield f"{shares[0]} % of `test`, {shares[1]} of `deeper_valid`, {shares[2]} of `deeper`"
  yield f"{shares[3]} of `composition`, {shares[4]} of `primitive`"
  (tables,) = cells("generalisation/table_lookup_forward")["neural data router"].values()
  shares = [f"{tables['scores'][part]['exact_match']:.1f}" for part in parts]
  yield f"{shares[0]} % of `test`, {shares[1]} of `deeper_valid`, but {shares[2]} of `deeper`"
  trained = tables["scores_as_trained"]["deeper"]["exact_match"]
  yield f"({trained:.1f} with the 8 repetitions of training; one run"
  up = record("systematic/scan_mcd1-scratchpad-counting-up.json")["scores"]["test"]
  yield f"{up['exact_match']:.1f} % of MCD1's test"
  hints = record("systematic/copy-successive-hints.json")["scores"]
  shares = [f"{hints[part]['exact_match']:.1f}" for part in ("longer_2", "longer_3")]
  yield f"100, {shares[0]} and {shares[1]} % (one run"
  (short,) = cells("generalisation/reverse-3000-steps")["relative, index hints"].values()
  shares = [f"{short['scores'][part]['exact_match']:.1f}" for part in ("longer_2", "longer_3")]
  yield f"after 3,000 steps {shares[0]} and {shares[1]} % (one run)"
  (hinted,) = cells("generalisation/addition")["relative, index hints"].values()
  share = hinted["scores"]["test"]["exact_match"]
  yield f"sums even of trained lengths ({share:.1f} % right after 8,000 steps)"
  row = "relative, index hints, scratchpad"
  written = [one["scores"] for one in cells("generalisation/addition-3000-steps")[row].values()]
  shares = [
    re.sub(", (?=[^,]*$)", " and ", ", ".join(f"{one[part]['exact_match']:.1f}" for one in written))
    for part in ("test", "longer_2", "longer_3")
  ]
  yield f"three runs have {shares[0]} % there, {shares[1]} % at up to twice the length"
  yield f"and {shares[2]} % at up to three times"
  longer = cells("generalisation/scan_length_26-3000-steps")
  rows = ("LSTM", "plain", "relative", "LSTM, recoded by entropy")
  runs = [longer[row][0] for row in (*rows, "LSTM, recoded by expected loss in use")]
  assert abs(runs[0]["parameters"] / runs[1]["parameters"] - 1) < 0.01
  shares = [f"{one['scores']['test']['exact_match']:.1f}" for one in runs]
  yield f"gets {shares[0]} % of the longer commands right"
  yield f"without a scratchpad have {shares[1]} and {shares[2]} %"
  yield f"it gets {shares[3]} and {shares[4]} %: no gain, of one run each"
  written = [
    cells(f"generalisation/{name}-3000-steps")["relative, scratchpad"][0]
    for name in ("table_lookup", "table_lookup_forward")
  ]
  shares = [[one["scores"][part]["exact_match"] for part in parts] for one in written]
  yield "one run for each order, {:.0f} and {:.0f} minutes".format(
    *(one["train_seconds"] / 60 for one in written)
  )
  assert {found for one in shares for found in one[1:3]} == {0.0}
  tests = f"{shares[0][0]:.1f} and {shares[1][0]:.1f} % of `test`"
  yield f"{tests}, none of `deeper_valid` and `deeper`"
  few = record("systematic/table_lookup_forward-scratchpad-22-numbers.json")["scores"]
  assert few["deeper"]["exact_match"] == 0
  yield f"{few['deeper_valid']['exact_match']:.1f} % of `deeper_valid` were right"
  cogs = [one["scores"] for one in cells("generalisation/cogs-3000-steps")["relative"].values()]
  assert len(cogs) == 3
  for part, words in (("test", "the published test"), ("held_out", "what was kept from training")):
    first, second, third = (f"{one[part]['exact_match']:.1f}" for one in cogs)
    yield f"{first}, {second} and {third} % of {words}"
  roles = []
  for one in cogs:
    for name, value in one["held_out"].items():
      if name.startswith("exact_match/category/"):
        if name.endswith("_recursion"):
          assert value == 0.0
        else:
          roles.append(value)
  yield f"right in {min(roles):.0f} to {max(roles):.0f} of 100 sentences"
  published, rescaled = (less_competing(weights, "test") for weights in COMPETING)
  yield f"{interval(published, 1, sign='+')} BLEU where the weights of heads sum to 1"
  yield f"{interval(rescaled, 1, sign='+')} where they sum to the number of heads"
  apart = [a - b for a, b in zip(published, rescaled, strict=True)]
  yield f"the two are {interval(apart, 1, sign='+')} apart"


def longest_commands():
  """The seed that does not solve the length split, by length of its answers."""
  cell = record("generalisation/scan_length-3000-steps/relative-scratchpad-seed2.json")
  found = {
    name.rsplit("/", 1)[1]: value
    for name, value in cell["scores"]["test"].items()
    if name.startswith("exact_match/target_words/")
  }
  yield (
    f"has {found['65-96']:.0f} % of the answers of up to 96 words, {found['97-128']:.0f} % of up to"
    " 128 and none beyond"
  )
  assert not found["129-192"]
  windowed, mcd3 = "relative, sliding window, scratchpad", "generalisation/scan_mcd3-3000-steps"
  test, valid = (seeds(mcd3, windowed, part, "exact_match") for part in ("test", "valid"))
  lengths = seeds("generalisation/scan_length-3000-steps", windowed, "test", "exact_match")
  shares = ["{:.1f}, {:.1f} and {:.1f} %".format(*found) for found in (lengths, test)]
  yield f"It has {shares[0]} of the longer commands right, and {shares[1]} of MCD3"
  near = [record(f"systematic/scan_mcd3-scratchpad-near-words-seed{seed}.json") for seed in (1, 2)]
  yield "bring {:.1f} and {:.1f} % (seeds 1 and 2; the first leaves".format(
    *(one["scores"]["valid"]["exact_match"] for one in near)
  )
  more = record("systematic/scan_mcd3-sliding-window-dropout-0.3-seed2.json")["splits"][0]
  assert more["split"] == "valid"
  plain = seeds(mcd3, "relative, scratchpad", "valid", "exact_match")
  yield "({:.1f}, {:.1f} and {:.1f} %, without it {:.1f}, {:.1f} and {:.1f})".format(*valid, *plain)
  yield f"one of five with dropout 0.3 {more['exact_match']:.1f} % (seed 2;"


def forms_of_scratchpads():
  """A row for each form of SCAN's scratchpads: what a command's answer is."""
  forms = {
    "": {},
    " with separators": {"separator": True},
    " with what follows": {"what_follows": True},
  }
  rows = []
  for name, fields in forms.items():
    pairs = ScanData(split="simple", scratchpad=True, **fields).load("train")
    answer = dict(zip(pairs.source, pairs.target, strict=True))["jump twice and walk left"]
    rows.append([f"scratchpad{name}", f"`{answer}`"])
  return rows


def arithmetic_in_short():
  found = seeds("generalisation/arithmetic", "near words, scratchpad", "deeper", "exact_match")
  assert len(found) == 3
  mean = statistics.mean(found)
  yield f"of `near words, scratchpad` with 8,000 steps have {mean:.1f} on average"


def two_words_more():
  """SCAN's scratchpads with a word more, beside those without."""

  def shares(data, row):
    found = seeds(f"generalisation/scan_{data}-steps", row, "test", "exact_match")
    *first, last = (f"{share:.1f}" for share in found)
    return f"{', '.join(first)} and {last}"

  jump, mcd3, around = "jump-5000", "mcd3-3000", "around_right-3000"
  yield f"{shares(jump, f'{ADDED} with separators')} % of jump for {shares(jump, ADDED)}"
  plain = "relative, scratchpad"
  yield f"and {shares(mcd3, f'{plain} with separators')} % of MCD3 for {shares(mcd3, plain)}"
  of_valid = [
    "{:.1f}, {:.1f} and {:.1f} %".format(*seeds(f"generalisation/scan_{mcd3}-steps", row, *score))
    for row, *score in (
      (f"{plain} with separators", "valid", "exact_match"),
      (f"{plain} with what follows", "test", "exact_match"),
    )
  ]
  yield f"(validation: {of_valid[0]})"
  yield f"but {of_valid[1]} of MCD3"
  right = shares(around, f"{ADDED} with what follows")
  yield f"{right} % of `around right` for {shares(around, ADDED)}"
  yield f"two runs of it have {shares(jump, f'{ADDED} with what follows')} % (seeds 0 and 2)"


def commands_in_short():
  """README says what the page on systematic generalisation says of SCAN and of competition."""
  shares = {row[0]: row[3] for row in best_of_data() if row[0].startswith("scan_")}

  def between(*data):
    found = [float(share) for one in data for share in shares[f"scan_{one}"].split(", ")]
    low, high = min(found), max(found)
    return f"{high:.1f} %" if low == high else f"{low:.1f} to {high:.1f} %"

  yield f"{between('length_26')} of longer commands than the 26 actions of training"
  lengths = (
    seeds("generalisation/scan_length-3000-steps", row, "test", "exact_match")
    for row in ("relative, scratchpad", "relative, sliding window, scratchpad")
  )
  whole, windowed = (", ".join(f"{share:.1f}" for share in found) for found in lengths)
  yield f"(where training is cut at 22, {whole} %, and {windowed} % in a sliding window)"
  yield f"{between('mcd1', 'mcd2')} of compounds that diverge in MCD1 and MCD2"
  yield f"with a separator after every action {between('mcd3')} in MCD3"
  yield f"{between('jump')} of `addprim_jump`, three runs each"
  published, rescaled = (interval(less_competing(w, "test"), 1, sign="+") for w in COMPETING)
  yield f"it brings {published} BLEU as published, and {rescaled} with `competition.rescale`"


def copied():
  """A row for each model that copies: exact match by length, over three seeds."""
  lengths = ("test", "longer 2", "longer 3")
  return shown_rows("generalisation/quick", [(f"exact {length}", 1) for length in lengths])


def copying_effects():
  effects = record("generalisation/quick/result.json")["effects"]
  found = {(one["effect"], one["column"]): one for one in effects}
  for factor in ("relative", "competition"):
    for column in ("exact longer 2", "exact longer 3"):
      one = found[factor, column]
      yield f"{one['size']:+.1f} [{one['low']:.1f}, {one['high']:.1f}]"
  (long,) = cells("generalisation/copy")["relative"].values()
  shares = (long["scores"][part]["exact_match"] for part in ("longer_2", "longer_3"))
  yield "{:.1f} and {:.1f} %".format(*shares)


def competing_or_not():
  """A row for each comparison: what competing heads or mechanisms score more, on both sides."""

  def bracketed(size, low, high, digits=1):
    return f"{float(size):+.{digits}f} [{float(low):.{digits}f}, {float(high):.{digits}f}]"

  competing, plain = (
    [split(f"speedrun/{kind}-seed{n}.json")["bleu"] for n in range(3)] for kind in ("cah", "plain")
  )
  less = interval([a - b for a, b in zip(competing, plain, strict=True)], 2, sign="+")
  rows = [["[Tatoeba]...", "encoder", "BLEU", less, ""]]
  for data, place, score in (
    ("[grammar]...", "encoder", "BLEU; of deeper sentences"),
    ("the same", "decoder", "the same"),
    ("the same", "cross", "the same"),
  ):
    shown = (effect(place, column, 2).split(",")[0] for column in ("BLEU test", "BLEU depth"))
    rows.append([data, place, score, *shown])
  for data, weights in (("[grammar]...", "1"), ("the same...", "their number")):
    shown = (interval(less_competing(weights, split), 2, sign="+") for split in ("test", "depth"))
    rows.append([data, "all", "BLEU; of deeper sentences", *shown])
  copies = record("generalisation/quick/result.json")["effects"]
  found = {one["column"]: one for one in copies if one["effect"] == "competition"}
  shown = (
    bracketed(*(found[column][name] for name in ("size", "low", "high")))
    for column in ("exact test", "exact longer 2")
  )
  rows.append(["[copying]...", "encoder", "right outputs, per cent; of twice the length", *shown])
  test = paired_test(*(seeds(TIM, row, "test", "loss") for row in ("TIM", "TIM-NoComp")))
  mean, half = test.difference.mean, test.difference.half
  rows.append(["[masked...", "all", "loss, nats", bracketed(mean, mean - half, mean + half, 3), ""])
  return rows


def continual():
  """A row for each network and way of use: per cent right after 50, 200 and 600 classes."""
  used = {
    "last_layer": "in order, the last layer",
    "prediction_layers": "in order, two layers",
    "rehearsal": "in order, with rehearsal",
    "ewc": "in order, elastic weight consolidation",
    "interleaved": "mixed, the last layer",
    "fine_tuned": "mixed, all layers",
    "scratch": "mixed, from fresh parameters",
  }
  rows = []
  for network, runs in sorted(cells("continual/tiny").items()):
    scores = runs[0]["scores"]["test"]
    for name, text in used.items():
      if f"{name}/accuracy_600" in scores:
        found = (100 * scores[f"{name}/accuracy_{classes}"] for classes in (50, 200, 600))
        rows.append([network, text, *(f"{share:.1f}" for share in found)])
  return rows


def exchanged_activations():
  """A row for each replacement: outputs that become the source's, per cent, and of the control."""
  names = {
    "encoder self, layer 0": "router, layer 0",
    "encoder self, layer 1": "router, layer 1",
    "all codes": "both routers",
    "all codes, at every word": "both routers, at every word",
    "residual stream, encoder, layer 0": "residual stream, layer 0",
    "residual stream, encoder, layer 1": "residual stream, layer 1",
  }
  parts = [
    record(f"composition/scan_jump-{one}-seed0.json")["patching"] for one in ("valid", "test")
  ]
  rows = []
  for name, label in names.items():
    row = [label]
    for part in parts:
      found = part["replaced"][name]
      for outcome in ("source", "unchanged"):
        shares = (100 * found[one][outcome]["share"] for one in ("patched", "control"))
        row.append(" / ".join(f"{share:.1f}" for share in shares))
    rows.append(row)
  return rows


def homomorphism():
  """A row for each layer and split: errors of both families, and with shuffled words."""
  rows = []
  for split in ("valid", "test"):
    found = record(f"composition/scan_jump-{split}-seed0.json")["homomorphism"]
    for layer, one in enumerate(found.values()):
      names = ("additive", "linear", "shuffled words, additive", "shuffled words, linear")
      rows.append([str(layer), split, *(f"{one[name]['value']:.2f}" for name in names)])
  return rows


ROLES = {
  "masked": "masked",
  "tatoeba": "Tatoeba",
  "gpt2": "GPT-2, grammar",
  "gpt2-text": "GPT-2, prose",
}


def looks_of_heads():
  """A row for every place: the best head's share, shuffled and untrained beside it, in per cent."""
  rows = []
  for place in ("previous", "itself", "next", "first", "separator", "rarest"):
    row = [place]
    for name in ROLES:
      found = record(f"roles/{name}.json")["looks"][place]
      parts = (found or {}).get("value"), *((found or {}).get(k) for k in ("shuffled", "untrained"))
      row.append(" / ".join(f"{100 * part:.1f}" for part in parts) if found else "")
    rows.append(row)
  return rows


def importance_of_heads():
  """Lowest and highest rank correlation of two ways, agreement of halves; ranks of W_Q W_K^T."""
  rows = []
  for name, label in ROLES.items():
    found = record(f"roles/{name}.json")
    importance, spectra = found["importance"], found["spectra"]["trained"]
    pairs = [c for i, line in enumerate(importance["correlations"]) for c in line[:i]]
    halves = importance["halves"].values()
    ranks = (f"{spectra[k]['rank']:.1f} of {spectra[k]['of']}" for k in ("heads", "together"))
    row = [f"{min(pairs):.2f} to {max(pairs):.2f}", f"{min(halves):.2f} to {max(halves):.2f}"]
    rows.append([label, *row, f"{importance['largest_ablation']:.3f}", *ranks])
  return rows


def pruned_heads(name):
  """A row for every price: heads left, and the loss with them, as ablation and as chance choose."""
  rows = []
  for found in record(f"roles/{name}.json")["pruning"]:
    losses = (f"{found[k]:.3f}" for k in ("loss", "by_ablation", "at_random"))
    rows.append([f"{found['price']:g}", str(found["heads"]), *losses])
  return rows


def codes_of_routers():
  rows = []
  for one in record("codes/scan_jump-seed0.json")["annotations"]:
    found = one["readings"]
    shares = (
      found["all codes"]["test"], one["word alone"]["test"], found["residual stream"]["test"],
      found["all codes"]["control"],
    )  # fmt: skip
    shown = [f"{100 * share['share']:.1f}" for share in shares]
    rows.append([one["annotation"], str(one["classes"]), *shown])
  return rows


def mechanisms():
  columns = (("loss test", 3), ("accuracy test", 3), ("PPL valid", 2))
  counts = {row: str(next(iter(runs.values()))["parameters"]) for row, runs in cells(TIM).items()}
  return [[row, f"{int(counts[row]):,}", *rest] for row, *rest in shown_rows(TIM, columns)]


def mechanisms_learned():
  losses = {row: seeds(TIM, row, "test", "loss") for row in ("TIM", "TIM-NoComp")}
  pairs = zip(losses["TIM"], losses["TIM-NoComp"], strict=True)
  test = paired_test(*map(list, zip(*pairs, strict=True)))
  mean, half = test.difference.mean, test.difference.half
  yield f"by {mean:.3f} nats [{mean - half:.3f}, {mean + half:.3f}]"
  yield f"true difference of {detectable(test.deviation, 5):.2f} nats would have been found"
  spread = [value for row in losses for value in losses[row]]
  yield f"from {min(spread):.2f} to {max(spread):.2f} nats"
  times = [one["train_seconds"] / 60 for runs in cells(TIM).values() for one in runs.values()]
  yield f"{statistics.median(times):.0f} minutes"


def routers_learned():
  lines = {(line["row"], line["column"]): line for line in lines_of(f"{META_ROUTERS}/numbers.csv")}
  found = [float(lines["meta", f"BLEU {name}"]["detectable"]) for name in ("test", "length")]
  yield f"of {found[0]:.1f} BLEU in distribution or {found[1]:.1f} on length"
  lost = float(lines["sequential", "BLEU length"]["difference"])
  yield f"(sequential {-lost:.1f} BLEU on length)"
  runs = cells(META_ROUTERS)
  times = {
    row: statistics.median(one["train_seconds"] for one in runs[row].values()) / 60
    for row in ("joint", "meta")
  }
  yield f"a run took {times['joint']:.1f} minutes (joint) to {times['meta']:.1f} (meta)"


def expressions():
  rows = []
  for label, row, published in (
    ("20 expressions", "pre-training", 0.9983),
    ("10 others: CLS vectors", "CLS vectors", 0.9202),
    ("and signatures and types", "and types", 0.9857),
    ("and all else", "and all else", 0.9953),
    ("all, from fresh parameters", "fresh", None),
  ):
    folder = "neural_interpreters/tiny"
    found = interval(seeds(folder, row, "test", "fuzzy/r2"), 4)
    least = min(seeds(folder, row, "test", "fuzzy/r2_min"))
    rows.append([label, found, f"{least:.4f}", f"{published:.4f}" if published else ""])
  return rows


def copying():
  rows = []
  for label, row in (
    ("small: 6 modules of 32 units, 3 active", "RIM"),
    ("small-lstm-192", "LSTM-192"),
    ("small-lstm-96", "LSTM-96"),
  ):
    short, long = (
      interval(seeds("copying/tiny", row, name, "loss"), 4) for name in ("blanks_15", "blanks_60")
    )
    exact = interval(seeds("copying/tiny", row, "blanks_60", "exact_match"), 1)
    rows.append([label, short, long, f"{exact} %"])
  return rows


def digits():
  """Per cent right by size, a figure a seed."""
  sizes, found = (14, 16, 19, 24), cells("digits/cpu")
  rows = []
  for row, cell in (
    ("LSTM-240", "LSTM of 240 units"),
    ("RIM", "6 modules of 40 units, 4 active"),
  ):
    shown = (seeds("digits/cpu", row, f"pixels_{size}", "exact_match") for size in sizes)
    minutes = [found[row][seed]["train_seconds"] / 60 for seed in sorted(found[row])]
    figures = [", ".join(f"{one:.1f}" for one in scores) for scores in shown]
    rows.append([cell, *figures, ", ".join(f"{one:.0f}" for one in minutes)])
  return rows


def digits_ahead():
  """Modules less the LSTM, seed by seed, and on average."""
  rim, lstm = (cells("digits/cpu")[row] for row in ("RIM", "LSTM-240"))

  def ahead(size):
    part = f"pixels_{size}"
    return [
      rim[seed]["scores"][part]["exact_match"] - lstm[seed]["scores"][part]["exact_match"]
      for seed in range(3)
    ]

  def listed(size):
    *others, last = (f"{one:.1f}" for one in ahead(size))
    return f"{', '.join(others)} and {last}"

  yield f"ahead by {listed(19)} points at 19 x 19, {interval(ahead(19), 1)} on average"
  yield f"and by {listed(24)} at 24 x 24, {interval(ahead(24), 1)}."
  yield f"in as many epochs, {interval([-one for one in ahead(14)], 1)} points"


def equal_minutes():
  """Translation models after as many minutes: steps, BLEU and perplexity."""
  rows = []
  for row in ("Transformer", "LSTM, additive", "LSTM, multiplicative"):
    (run,) = cells("seq2seq/tatoeba")[row].values()
    assert round(run["train_seconds"] / 60) == 20
    bleu = [f"{run['scores'][part]['bleu']:.1f}" for part in ("valid", "test", "test-unseen")]
    perplexity = f"{run['scores']['test']['perplexity']:.2f}"
    rows.append([row, f"{run['parameters']:,}", f"{run['best']['step']:,}", *bleu, perplexity])
  return rows


def longer_copying():
  def listed(values, digits):
    *others, last = (f"{value:.{digits}f}" for value in values)
    return f"{', '.join(others)} and {last}"

  short, long = (seeds("copying/cpu", "RIM", name, "loss") for name in ("blanks_50", "blanks_200"))
  exact = seeds("copying/cpu", "RIM", "blanks_200", "exact_match")
  yield (
    f"Modules have {listed(short, 4)} nats after 50 blanks and {listed(long, 4)} after 200,"
    f" {statistics.mean(long):.4f} on average, where {listed(exact, 1)} % of the sequences are"
    " right"
  )
  lstm = seeds("copying/cpu", "LSTM-300", "blanks_200", "loss")
  yield f"guesses after as many steps, at {interval(lstm, 3)} nats after 200 blanks"


# docs/tables.md.

PLACES = ("none", "enc", "dec", "enc+dec", "x", "enc+x", "dec+x", "all")
SHIFTED = ("combination", "attractor", "depth", "length")
TABLE_51 = "5.1-heads4/tiny"
ABLATION = "recoding-5.6/tiny"


def places():
  published = {(r["row"], r["column"]): r["published"] for r in lines_of(f"{TABLE_51}/numbers.csv")}
  columns = (
    ("test", "bleu", 2, "BLEU test"), ("test", "perplexity", 3, "PPL test"),
    ("train", "perplexity", 3, "PPL train"),
  )  # fmt: skip
  return [
    [row] + [
      f"{interval(seeds(TABLE_51, row, name, value), digits)}"
      f" [{float(published[row, column]):.{digits}f}]"
      for name, value, digits, column in columns
    ]
    for row in PLACES
  ]  # fmt: skip


def places_shifted(value, digits):
  return [
    [row, *(interval(seeds(TABLE_51, row, name, value), digits) for name in SHIFTED)]
    for row in PLACES
  ]


@functools.cache
def effects():
  return {(r["effect"], r["column"]): r for r in lines_of(f"{TABLE_51}/effects.csv")}


def effect(name, column, digits):
  found = effects()[name, column]
  half = float(found["high"]) - float(found["size"])
  return f"{float(found['size']):+.{digits}f} ± {half:.{digits}f}, p {float(found['p']):.2g}"


def effect_rows(*columns):
  names = list(dict.fromkeys(name for name, _ in effects()))
  return [[name, *(effect(name, *column) for column in columns)] for name in names]


def roberta():
  rows = []
  for name, row in (("none", "none"), ("encoder self-attention", "enc")):
    losses = seeds("roberta/public_domain", row, "test", "loss")
    unigram = seeds("roberta/public_domain", row, "test", "unigram")
    below = ", ".join(f"{u - v:.3f}" for u, v in zip(unigram, losses, strict=True))
    rows.append([name, *(f"{loss:.3f}" for loss in losses), interval(losses, 3), below])
  return rows


def difference(folder, row, reference, name, value, digits):
  pairs = zip(seeds(folder, row, name, value), seeds(folder, reference, name, value), strict=True)
  shown = interval([a - b for a, b in pairs], digits, sign="+")
  return shown.replace("+0.00 ", "0.00 ").replace("-0.00 ", "0.00 ")  # no sign at zero


def ablation():
  published = {r["row"]: r["published"] for r in lines_of(f"{ABLATION}/numbers.csv")
               if r["column"] == "PPL test"}  # fmt: skip
  rows = [["none", interval(seeds(ABLATION, "none", "test", "perplexity"), 2), "", "", "126.60"]]
  merged = {
    "surprisal, constant, added at test": ("surprisal, any", 3),
    "MC dropout, constant, added at test": ("MC dropout, any", 3),
    "ensemble, learned, added at test": ("ensemble, learned or predicted", 2),
  }
  steps, order = ("constant", "learned", "predicted"), list(published)
  for row in order[1:]:
    signal, step, when = row.split(", ")
    if any(
      row != first and row in order[order.index(first) :][:n] for first, (_, n) in merged.items()
    ):
      continue
    label, count = merged.get(row, (f"{signal}, {step}", 1))
    same = [f"{signal}, {s}, {when}" for s in steps[steps.index(step) :][:count]]
    for other in same:  # rows that are shown as one are equal
      assert difference(ABLATION, other, row, "test", "perplexity", 2) == "0.00 ± 0.00"
    rows.append([
      f"{label}, {when}",
      interval(seeds(ABLATION, row, "test", "perplexity"), 2),
      difference(ABLATION, row, "none", "test", "perplexity", 2),
      difference(ABLATION, row, "none", "depth", "perplexity", 2),
      ", ".join(f"{float(published[other]):.2f}" for other in same),
    ])  # fmt: skip
  return rows


# docs/recoding.md.


def signals():
  names = {
    "surprisal": "5", "argmax": "5", "nll": "1", "MC dropout": "0.001", "ensemble": "0.001",
  }  # fmt: skip
  more = {"MC dropout": ", 3 samples", "ensemble": ", 3 decoders"}
  rows = []
  for row in lines_of("recoding/ptb/table.csv"):
    signal, _, step = row["row"].partition(", ")
    label = f"{'anchored ' if signal == 'ensemble' else ''}{row['row']}"
    if step == "constant":
      label += f" ({names[signal]})"
    label += more.get(signal, "")
    one = cells("recoding/ptb")[row["row"]][0]
    scores = [f"{one['scores'][name]['perplexity']:.2f}" for name in ("valid", "test")]
    rows.append([label, *scores, f"{one['train_seconds'] / 60:.0f}..."])
  return rows


def garden_paths():
  rows = []
  for folder, label, digits in (
    ("surprisal-5", "surprisal as published, 5", 4), ("nll-1", "nll, 1 (nats)", 3),
  ):  # fmt: skip
    (own,) = lines_of(f"garden-paths/{folder}/error.csv")
    later = lines_of(f"garden-paths/{folder}/later.csv")
    found = [f"{float(r['error']):+.{digits}f} ± {float(r['±']):.{digits}f}" for r in later[1:4]]
    assert float(own["raised, %"]) == 0
    before, after = (f"{float(own[name]):.{digits}f}" for name in ("before", "after"))
    rows.append([label, before, after, "never", *found])
  return rows


def later_surprisal():
  return [
    [
      label,
      *(
        f"{float(row['surprisal']):+.3f} ± {float(row['± ']):.3f}"
        for row in lines_of(f"garden-paths/{folder}/later.csv")
      ),
    ]
    for folder, label in (("surprisal-5", "surprisal as published, 5"), ("nll-1", "nll, 1"))
  ]


def recoded_search():
  rows = []
  for label in ("plain", "0", "0.1", "1", "10"):
    found = split(f"tatoeba-recoding/{label}.json")
    entropies = [f"{found[k]:.3f}" if k in found else "" for k in ("entropy_before", "entropy")]
    low, high = found["bleu_low"], found["bleu_high"]
    rows.append([
      "none" if label == "plain" else label,
      f"{found['bleu']:.2f}",
      f"{low:.2f} - {high:.2f}",
      f"{found['exact_match']:.2f} %",
      *entropies,
      # In brackets: other work ran on the machine.
      f"({found['sentences_per_second']:.1f})"
      if label in ("0.1", "10")
      else f"{found['sentences_per_second']:.1f}",
    ])  # fmt: skip
  return rows


# docs/nemot.md.


def pretraining():
  valid = split("nemot-pretrain/small-seed0.json", "valid")
  rows = []
  for name, scored in (("C4, validation", "valid"), ("Penn Treebank, validation", "ptb"),
                       ("WikiText-2, validation", "wikitext2")):  # fmt: skip
    found = split("nemot-pretrain/small-seed0.json", scored)
    rows.append([
      name,
      f"{found['tokens']:,}",
      "128",
      f"{found['loss']:.3f}",
      f"{found['perplexity']:.1f}",
      f"{found['word_perplexity']:,.0f}",
    ])  # fmt: skip
    if found is not valid:
      rows.append(["", "", "32", None, None, None])  # no file has the overlapping windows
  return rows


def zero_shot():
  rows = []
  for label, row in (("NeMoT", "NeMoT"), ("gate off", "gate off"), ("decoder", "decoder")):
    one = cells("nemot-3.1/small")[row][0]
    scores = [f"{one['scores'][s]['perplexity']:.1f}" for s in ("valid", "ptb", "wikitext2")]
    rows.append([label, f"{one['parameters'] / 1e6:.2f} M", *scores])
  return [*rows, [None] * 5]


def zero_shot_grammar():
  folder, rows = "nemot-3.1/tiny", []
  for row in ("NeMoT", "gate off", "decoder"):
    found = [row]
    for name in ("test", "length", "depth", "combination", "attractor"):
      star = starred(folder, row, "decoder", name, "perplexity")
      shown = interval(seeds(folder, row, name, "perplexity"), 2)
      found.append(shown + (" *" if star else ""))
    rows.append(found)
  return rows


def hundreds(values):
  mean = mean_interval(values)
  return "100 ± 0" if mean.mean == 100 else interval(values, 1)


def worlds(*formats):
  rows = []
  for row in ("NeMoT", "gate off", "decoder"):
    names = [f"exact_match/{kind}/{facts}" for kind in formats for facts in (1, 2, 3)]
    rows.append([row, *(hundreds(seeds(WORLDS, row, "test", name)) for name in names)])
  scores = [row for row in record(f"{WORLDS}/baselines.json")["rows"] if row["split"] == "test"]
  for name in BASELINES:
    (one,) = (row for row in scores if row["baseline"] == name)
    if any(name in one for name in names):
      rows.append([name, *(f"{one[n]:.1f}" if n in one else "" for n in names)])
  return rows


def worlds_shifted():
  return [
    [
      row,
      *(interval(seeds(WORLDS, row, name, "score"), 1) for name in ("length", "facts", "names")),
    ]
    for row in ("NeMoT", "gate off", "decoder")
  ]


def general():
  names = (
    "race_middle", "mctest", "arc", "openbookqa", "boolq", "subjqa", "fairytaleqa", "siqa", "piqa",
    "winogrande", "subjqa_tripadvisor",
  )  # fmt: skip
  formats = ("multiple_choice", "yes_no", "extractive", "abstractive")
  best, last = (
    {row["split"]: {**row, **row.get("parts", {})} for row in record(path)["splits"]}
    for path in ("nemot-general/small-seed0.json", "nemot-general/small-seed0-last.json")
  )
  shares = {
    (row["baseline"], row["split"]): row for row in record("nemot-general/baselines.json")["rows"]
  }
  rows = []
  for name in names:
    scored = (
      "valid" if name == "fairytaleqa" else "test" if f"{name}/score" in best["test"] else "unseen"
    )
    found = [scores[scored] for scores in (best, last)]
    counts = [found[0].get(f"{name}/{kind}_questions", 0) for kind in formats]
    shown = [f"{scores[f'{name}/score']:.1f}" for scores in found]
    overlap = []
    for baseline in ("sliding window", "window and distance", "logistic regression"):
      row = shares.get((baseline, f"{scored} {name}"), {})
      values = [row[f"exact_match/{kind}"] for kind in formats[:2] if f"exact_match/{kind}" in row]
      overlap.append(f"{values[0]:.1f}" if values else "")
    # No file has what answers that read nothing get.
    rows.append([None, f"{sum(counts):,.0f}", None, None, None, *overlap, *shown])
  return rows


# docs/kernels.md.


def attention_on_a_gpu():
  found = record("benchmarks/attention-h100.json")
  repeats = 20  # runs in a program
  columns = ("rows of 128", "rows of 1024", "rows of 4096", "rows of 1024, causal")
  names = ("ours", "ours, weights", "ours, competition inside", "cuDNN")

  def cell(column, which, name):
    seconds = found["timings"][f"{column}, {which}: {name}"]["seconds"]["median"]
    return f"{seconds / repeats * 1e6:.0f}"

  return [
    (f"{which}: {name}", *(cell(column, which, name) for column in columns))
    for which in ("forward", "training")
    for name in names
  ]


def h100_designs():
  found = record("benchmarks/routing-compiled.json")["tables"]["h100"]
  rows = []
  for label, design in (
    ("no routing", "no routing"), ("plain XLA", "plain XLA"), ("softmax alone", "softmax alone"),
    ("first matrix packed into queries, keys and values", "packed"),
  ):  # fmt: skip
    forward, training = (found[f"{design}, {way}"] for way in ("forward", "training"))
    kernels = [str(one["kernels"]) for one in (forward, training)]
    rows.append([
      label,
      ", ".join(dict.fromkeys(kernels)) if kernels[0] == "0" else ", ".join(kernels),
      *(f"{one[key]:.1f}" for one in (forward, training) for key in ("MiB", "floor us")),
    ])  # fmt: skip
  units = ("", "", " MiB", " us", " MiB", " us")
  rows[0] = [cell + unit for cell, unit in zip(rows[0], units, strict=True)]
  return rows


def tpu_designs():
  compiled = record("benchmarks/routing-compiled.json")["tables"]
  return [
    [
      design,
      *(
        "{MiB:.0f} MiB, {model us:.0f} us".format(**compiled[chip][f"{design}, {way}"])
        for chip in ("v5e", "v5p")
        for way in ("forward", "training")
      ),
    ]
    for design in (
      "no routing", "plain XLA", "flat XLA", "softmax alone", "packed",
    )
  ]  # fmt: skip


def router_types():
  return [
    [
      kind,
      *(
        ratio(
          "router-types-cpu",
          f"CPU {way}, bfloat16 layer, {kind}: router in float32 / in bfloat16",
          3,
        )
        for way in ("forward", "training")
      ),
    ]
    for kind in ("heads", "experts")
  ]


def cpu_layers():
  names = {"fused, the default": "layer with competing heads / plain",
           "step by step": "the same, step by step / plain"}  # fmt: skip
  ways = ("forward", "training")
  return [
    [label, *(ratio("routing-compiled-2026-11-23", f"CPU {way}: {name}", 3) for way in ways)]
    for label, name in names.items()
  ]


def attention_layers(device):
  found = record("benchmarks/attention-compiled.json")["tables"][device]
  assert not any(row.get("spilt") for row in found.values())
  return [
    [
      f"{way}: {label}",
      *(f"{found[f'{layer}, rows of {time}, {way}']['MiB']:,.0f}" for time in (128, 1024, 4096)),
    ]
    for way in ("forward", "training")
    for layer, label in (
      ("plain", "no competition"), ("float32", "competing, routers in float32"),
      ("inside", "competing, inside"),
    )
  ]  # fmt: skip


def layers_of_devices(*layers):
  """MiB, a row for each device and pass: layers in rows of 128 and of 1,024."""
  tables = record("benchmarks/attention-compiled.json")["tables"]
  return [
    [
      f"{title}, {way}",
      *(
        f"{tables[device][f'{layer}, rows of {time}, {way}']['MiB']:,.0f}"
        for time in (128, 1024)
        for layer in layers
      ),
    ]
    for device, title in (("h100", "H100"), ("v5e", "v5e"))
    for way in ("forward", "training")
  ]


def cached_attention():
  found = record("benchmarks/cached-attention-compiled.json")["tables"]["h100"]
  assert len(found) == 4 * 2 * 2
  assert not any(row["spilt"] for row in found.values())
  return [
    [
      str(count),
      *(
        f"{found[f'{count} queries, heads of 64, bfloat16'][way]:.0f}"
        for way in ("kernel", "XLA", "keys and values")
      ),
    ]
    for count in (1, 5)
  ]


def long_texts():
  found = record("benchmarks/long-text.json")["tables"]["h100"]
  spilt = record("benchmarks/attention-registers.json")["tables"]["h100"]
  # Three kernels with biases by distance, two without.
  assert len(spilt) == 2 * 4 * 2 * (3 * 2 + 3)
  assert not any(row["spilt"] for row in spilt.values())
  return [
    [
      label,
      *(f"{found[f'{tokens} tokens, {label}']:.1f}" for tokens in ("1,024", "8,192", "32,768")),
    ]
    for label in ("plain", "heads compete")
  ]


def expert_weights():
  found = record("benchmarks/experts-weights-compiled.json")["tables"]["weight gradient"]
  assert not any(row["spilt"] for row in found.values())
  chips = ("v5e", "v5p", "v6e", "h100")
  return [
    [
      label,
      *(f"{found[f'{c}, {way}']['MiB']:,.0f}" if f"{c}, {way}" in found else "" for c in chips),
    ]
    for label, way in (("kernel", "kernel"), ("XLA's batches", "batches"))
  ]


def experts_over_chips():
  rows = []
  for label, way in (("gather, the default", "gather"), ("exchange, capacity 1.25", "exchange")):
    tables = record(f"benchmarks/experts-{way}-2-layers-compiled.json")["tables"]
    one = tables[f"step, 2 layers, {way}"]
    beside = one["ms, collectives beside"], 100 * one["MFU at most, collectives beside"]
    rows.append(
      [
        label,
        f"{one['TFLOP laid out, chip']:.1f} TFLOP",
        f"{one['HBM GB, chip']:.0f} GB",
        f"{one['sent GB, chip']:.1f} GB",
        f"{one['ms']:,.0f} ms ({beside[0]:,.0f})",
        f"{100 * one['MFU at most']:.1f} % ({beside[1]:.1f} %)",
      ]
    )
  return rows


REFERENCE = "no figures: names and what they mean"


def causes(name, field):
  """Of all runs of a variant: that field of the test scores."""
  runs = record(f"meta_transfer/{name}.json")["runs"]
  assert [run["seed"] for run in runs] == list(range(len(runs)))
  return [run["test"][field] for run in runs]


def seconds(name):
  """Median and longest training."""
  found = [run["train_seconds"] for run in record(f"meta_transfer/{name}.json")["runs"]]
  return f"{statistics.median(found):.0f} ({max(found):.0f})"


def discrete_causes():
  rows = []
  for variant, name, sign in (
    ("(none)", "discrete", 1),
    ("b_to_a", "discrete_b_to_a", -1),
    ("values100", "values100", 1),
    ("values100_b_to_a", "values100_b_to_a", -1),
  ):
    beliefs = [belief if sign > 0 else 1 - belief for belief in causes(name, "belief")]
    ratios = [sign * ratio for ratio in causes(name, "log_ratio")]
    right = sum(belief > 0.99 for belief in beliefs)
    direction = "A to B" if sign > 0 else "B to A"
    least = f"{min(beliefs):.4f}"
    rows.append(
      [variant, direction, f"{right} of {len(beliefs)}", least, interval(ratios, 1), seconds(name)]
    )
  return rows


def adaptation_to_causes():
  rows = []
  runs = record("meta_transfer/discrete.json")["runs"]
  for seen in (0, 1, 2, 5, 10, 19):
    found = [run["adaptation"][seen] for run in runs]
    assert {row[0] for row in found} == {seen}
    means = [f"{mean_interval([row[place] for row in found]).mean:.3f}" for place in (1, 3)]
    differences = [row[5] for row in found]
    rows.append([str(seen), *means, interval(differences, 3, sign="+")])
  return rows


def rotated_causes():
  rows = []
  for variant, name in (
    ("rotation", "rotation"),
    ("rotation_b_to_a", "rotation_b_to_a"),
    ("rotation_linear", "rotation_linear"),
    ("rotation, even rates", "rotation_even"),
    ("rotation_static", "rotation_static"),
    ("rotation_linear, static", "rotation_linear_static"),
  ):
    away = [abs(error) for error in causes(name, "angle_error")]
    sure = sum(max(belief, 1 - belief) > 0.99 for belief in causes(name, "belief"))
    near = sum(error < 2 for error in away)
    errors = [f"{max(away):.2f}", f"{mean_interval(away).mean:.2f}"]
    count = f"of {len(away)}"
    rows.append([variant, f"{near} {count}", *errors, f"{sure} {count}", seconds(name)])
  return rows


TABLES = {
  ("README.md", "Use a model from the shell", 0): REFERENCE,
  ("README.md", "Competition", 0): REFERENCE,
  ("README.md", "Competition", 1): REFERENCE,
  ("README.md", "Recoding", 0): REFERENCE,
  ("README.md", "Modulation", 0): REFERENCE,
  ("README.md", "Results so far", 0): grammar,
  ("README.md", "Results so far", 1): tatoeba,
  ("README.md", "Results so far", 2): scan,
  ("README.md", "Speed", 0): speed_in_short,
  ("README.md", "Data", 0): REFERENCE,
  ("docs/install.md", "What comes with what", 0): REFERENCE,
  ("docs/meta_transfer.md", "Two variables of a few values", 0): discrete_causes,
  ("docs/meta_transfer.md", "Two variables of a few values", 1): adaptation_to_causes,
  ("docs/meta_transfer.md", "Two real variables behind a rotation", 0): rotated_causes,
  ("docs/meta_transfer.md", "From Python", 0): REFERENCE,
  ("docs/kernels.md", "Attention on GPUs and TPUs", 0): REFERENCE,
  ("docs/kernels.md", "Attention on GPUs and TPUs", 1): lambda: attention_layers("h100"),
  ("docs/kernels.md", "Attention on GPUs and TPUs", 2): long_texts,
  ("docs/kernels.md", "Measured on an H100", 0): attention_on_a_gpu,
  ("docs/kernels.md", "Biases by distance", 0): lambda: layers_of_devices(
    "plain", "biases by distance", "biases of pairs"
  ),
  ("docs/kernels.md", "Rotary positions, T5 and dropout", 0): lambda: layers_of_devices(
    "rotary", "T5", "dropout"
  ),
  ("docs/kernels.md", "Decoding on GPUs", 0): cached_attention,
  ("docs/kernels.md", "What is different on TPUs", 0): lambda: attention_layers("v5e"),
  ("docs/kernels.md", "Attention on CPUs", 0): cpu_attention,
  ("docs/kernels.md", "Tokens that did not choose a head", 0): chosen_attention,
  ("docs/kernels.md", "Routing by itself", 0): REFERENCE,
  ("docs/kernels.md", "What moves how many bytes", 0): h100_designs,
  ("docs/kernels.md", "What moves how many bytes", 1): tpu_designs,
  ("docs/kernels.md", "In the attention layer", 0): router_types,
  ("docs/kernels.md", "In the attention layer", 1): cpu_layers,
  ("docs/kernels.md", "The loss of an output layer", 0): (
    "printed by `train.main --aot`; no file is kept"
  ),
  ("docs/kernels.md", "Products of experts", 0): expert_weights,
  ("docs/nemot.md", "A language model of public domain text and C4", 0): pretraining,
  ("docs/nemot.md", "With a gate, without, and a decoder of as many parameters", 0): zero_shot,
  ("docs/nemot.md", "With a gate, without, and a decoder of as many parameters", 1): (
    zero_shot_grammar
  ),
  ("docs/nemot.md", "Questions about worlds", 0): (lambda: worlds("multiple_choice", "yes_no")),
  ("docs/nemot.md", "Questions about worlds", 1): lambda: worlds("extractive", "abstractive"),
  ("docs/nemot.md", "Questions about worlds", 2): worlds_shifted,
  ("docs/nemot.md", "Questions of real sets", 0): general,
  ("docs/baselines.md", "T5", 0): REFERENCE,
  ("docs/baselines.md", "LSTMs with attention", 0): equal_minutes,
  ("docs/pods-aot.md", "Models on v5e-16", 0): "printed by `train.main --aot`; no file is kept",
  ("docs/pods-aot.md", "Models on v5e-16", 1): "printed by `train.main --aot`; no file is kept",
  ("docs/pods-aot.md", "An optimizer divided over copies", 0): (
    "printed by `train.main --aot`; no file is kept"
  ),
  ("docs/pods-aot.md", "Experts over chips", 0): experts_over_chips,
  ("docs/pods.md", "Layout", 0): REFERENCE,
  ("docs/pods.md", "Starting", 0): REFERENCE,
  ("docs/pods.md", "What fails, and how", 0): REFERENCE,
  ("docs/python.md", "Public names", 0): REFERENCE,
  ("docs/glossary.md", "Glossary", 0): REFERENCE,
  ("docs/neural_interpreters.md", "Fuzzy expressions", 0): REFERENCE,
  ("docs/neural_interpreters.md", "Texts", 0): REFERENCE,
  ("docs/map.md", "Folders", 0): REFERENCE,
  ("docs/map.md", "One batch, from text to updated parameters", 0): REFERENCE,
  ("docs/map.md", "Where to change what", 0): REFERENCE,
  ("docs/map.md", "How to add", 0): REFERENCE,
  ("docs/few_shot.md", "Methods", 0): REFERENCE,
  ("docs/few_shot.md", "Data", 0): REFERENCE,
  ("docs/few_shot.md", "Measured", 0): few_shot,
  ("docs/leopard.md", "Methods", 0): REFERENCE,
  ("docs/your_own_data.md", "Real data sets", 0): REFERENCE,
  ("docs/leopard.md", "Data", 0): REFERENCE,
  ("docs/leopard.md", "Measured", 0): sentences_by_property,
  ("docs/meta_learning.md", "Learning to adapt", 0): REFERENCE,
  ("docs/recoding.md", "The language model that is recoded", 0): (
    "of the run's log, of which the file has the last epoch alone"
  ),
  ("docs/recoding.md", "Error signals on the Penn Treebank", 0): signals,
  ("docs/recoding.md", "Garden paths", 0): garden_paths,
  ("docs/recoding.md", "Garden paths", 1): later_surprisal,
  ("docs/recoding.md", "Translation by an LSTM that recodes its states", 0): REFERENCE,
  ("docs/recoding.md", "Translation, recoded while it is searched for", 0): recoded_search,
  ("docs/rims.md", "From Python", 0): REFERENCE,
  ("docs/rims.md", "Measured so far", 0): copying,
  ("docs/rims.md", "Measured so far", 1): digits,
  ("docs/roles.md", "What is measured", 0): REFERENCE,
  ("docs/roles.md", "Measured", 0): looks_of_heads,
  ("docs/roles.md", "Measured", 1): importance_of_heads,
  ("docs/roles.md", "Measured", 2): lambda: pruned_heads("masked"),
  ("docs/roles.md", "Measured", 3): lambda: pruned_heads("tatoeba"),
  ("docs/independent_mechanisms.md", "Use", 0): REFERENCE,
  ("docs/competing_experts.md", "Use", 0): REFERENCE,
  ("docs/neural_interpreters.md", "Fuzzy expressions", 1): expressions,
  ("docs/continual.md", "Meta-training", 0): REFERENCE,
  ("docs/continual.md", "Use", 0): REFERENCE,
  ("docs/continual.md", "Measured so far", 0): continual,
  ("docs/plasticity.md", "Plastic cells", 0): REFERENCE,
  ("docs/plasticity.md", "Plastic cells", 1): associations,
  ("docs/plasticity.md", "Fast weights in a Transformer", 0): REFERENCE,
  ("docs/sites.md", "Named activations", 0): REFERENCE,
  ("docs/sites.md", "Named activations", 1): REFERENCE,
  ("docs/sites.md", "Named activations", 2): REFERENCE,
  ("docs/sites.md", "Named activations", 3): REFERENCE,
  ("docs/sites.md", "Named activations", 4): REFERENCE,
  ("docs/speedrun.md", "Records and attempts", 0): speedrun,
  ("docs/speedrun.md", "What was tried", 0): speedrun_screening,
  ("docs/speedrun.md", "What was tried", 1): speedrun_dropout,
  ("docs/speed.md", "Translation", 0): transformer_speed,
  ("docs/speed.md", "Beam search", 0): decoding_speed,
  ("docs/speed.md", "Experts", 0): experts_speed,
  ("docs/speed.md", "Recoding", 0): recoding_speed,
  ("docs/speed.md", "Recoding", 1): streams_speed,
  ("docs/speed.md", "Decoders", 0): nemot_speed,
  ("docs/speed.md", "Bare products", 0): bare_products,
  ("docs/systematic.md", "Options for systematic generalisation", 0): REFERENCE,
  ("docs/systematic.md", "Cost", 0): ingredient_costs,
  ("docs/systematic.md", "Embeddings", 0): REFERENCE,
  ("docs/systematic.md", "Relatives of competition", 0): REFERENCE,
  ("docs/tables.md", "Where heads compete", 0): places,
  ("docs/tables.md", "Where heads compete", 1): lambda: places_shifted("perplexity", 3),
  ("docs/tables.md", "Where heads compete", 2): lambda: places_shifted("bleu", 2),
  ("docs/tables.md", "Where heads compete", 3): (
    lambda: effect_rows(("BLEU test", 2), ("PPL test", 3), ("PPL train", 3))
  ),
  ("docs/tables.md", "Where heads compete", 4): (
    lambda: effect_rows(*((f"BLEU {name}", 2) for name in SHIFTED))
  ),
  ("docs/tables.md", "Where heads compete", 5): (
    lambda: effect_rows(*((f"PPL {name}", 3) for name in SHIFTED))
  ),
  ("docs/tables.md", "RoBERTa with competing heads", 0): roberta,
  ("docs/tables.md", "Recoding removed, and added at test", 0): ablation,
  ("docs/independent_mechanisms.md", "Does competition help?", 0): mechanisms,
  ("docs/tables.md", "Whether competition helps, at equal parameters", 0): trial_of_competition,
  ("docs/tables.md", "Whether competition helps, at equal parameters", 1): screening_of_competition,
  ("docs/generalisation.md", "Does competition help?", 0): competing_or_not,
  ("docs/generalisation.md", "Beside published figures", 0): best_of_data,
  ("docs/generalisation.md", "Rows side by side", 0): rows_side_by_side,
  ("docs/generalisation.md", "SCAN", 0): lambda: generalised("scan", ("valid", "test")),
  ("docs/generalisation.md", "What a scratchpad says", 0): forms_of_scratchpads,
  ("docs/generalisation.md", "A search for settings", 0): searched,
  ("docs/generalisation.md", "Copying, reversing and adding", 0): copied,
  ("docs/generalisation.md", "PCFG SET", 0): lambda: generalised("pcfg", ("iid", "test")),
  ("docs/generalisation.md", "Composed tables", 0): composed_tables,
  ("docs/generalisation.md", "Composed tables", 1): tables_by_near_words,
  ("docs/generalisation.md", "Arithmetic", 0): nested_arithmetic,
  ("docs/generalisation.md", "What is exchanged when words are", 0): exchanged_activations,
  ("docs/generalisation.md", "What is exchanged when words are", 1): homomorphism,
  ("docs/generalisation.md", "Fuzzy logic in context", 0): context_logic_in_seeds,
  ("docs/generalisation.md", "Fuzzy logic in context", 1): context_logic,
  ("docs/generalisation.md", "What routers know", 0): codes_of_routers,
  ("docs/generalisation.md", "Data", 0): REFERENCE,
  ("docs/generalisation.md", "Ingredients", 0): REFERENCE,
  (
    "docs/training_regimes.md",
    "Ways of training routers",
    0,
  ): "the runs are not in `results/`",
  ("docs/training_regimes.md", "Meta-learned routers", 0): REFERENCE,
  ("docs/training_regimes.md", "Beside the other regimes", 0): lambda: meta_routers("BLEU", 2),
  ("docs/training_regimes.md", "Beside the other regimes", 1): lambda: meta_routers("PPL", 3),
}
CHECKED = {place: made for place, made in TABLES.items() if callable(made)}


def compare(shown, expected):
  """Cells that differ: (shown, expected). Of a cell that ends with "..." only the start counts."""
  if expected[-1] is ...:
    shown, expected = shown[: len(expected) - 1], expected[:-1]
  assert len(shown) == len(expected), f"{len(shown)} rows are shown, files have {len(expected)}"
  found = []
  for row, made in zip(shown, expected, strict=True):
    assert len(row) == len(made), (row, made)
    for cell, value in zip(row, made, strict=True):
      start = value is not None and value.endswith("...")
      same = value is None or (cell.startswith(value[:-3]) if start else cell == tidy(value))
      if not same:
        found.append((cell, value))
  return found


def test_every_table_is_read_from_a_file_or_has_a_reason_not_to_be():
  present = {
    (page.relative_to(ROOT).as_posix(), *place) for page in PAGES for place in tables_of(page)
  }
  assert present - set(TABLES) == set(), "add these to TABLES, with a function or a reason"
  assert set(TABLES) - present == set(), "these are no longer there"


@pytest.mark.parametrize("place", CHECKED, ids=lambda place: f"{place[0]}: {place[1]}, {place[2]}")
def test_figures_of_a_table_are_those_of_its_files(place):
  page, *where = place
  assert compare(tables_of(ROOT / page)[tuple(where)], CHECKED[place]()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_has_a_section_twice(page):
  """Tables and sentences are found by their section, so that a copy of one would go unchecked."""
  outside = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
  headings = re.findall(r"^##+ .*", outside, flags=re.MULTILINE)
  assert sorted(headings) == sorted(set(headings))


def test_a_changed_figure_is_seen():
  shown = tables_of(ROOT / "README.md")["Results so far", 2]
  changed = [list(row) for row in shown]
  changed[1][1] = "0.7 %"
  assert compare(changed, scan()) == [("0.7 %", "0.6 %")]


# Sentences.


def mean_of(folder, row, name, value):
  return mean_interval(seeds(folder, row, name, value)).mean


def ablation_sentences():
  def change(row, name="test"):
    pairs = zip(
      seeds(ABLATION, row, name, "perplexity"),
      seeds(ABLATION, "none", name, "perplexity"),
      strict=True,
    )
    return [a - b for a, b in pairs]

  added = "surprisal, constant, added at test"
  each = ", ".join(f"{value:.2f}" for value in change(added))
  deeper = mean_interval(change(added, "depth")).mean
  yield (
    f"raises perplexity by {mean_interval(change(added)).mean:.2f}, in each of the three seeds"
    f" ({each}), and by {deeper:.1f} on deeper sentences"
  )
  removed = [
    mean_interval(change(row)).mean
    for row in cells(ABLATION)
    if "removed" in row and "ensemble" not in row
  ]
  yield f"surprisal and MC dropout are {-max(removed):.1f} to {-min(removed):.1f} below `none`"


def factorial_sentences():
  def size(name, column, digits=2):
    return f"{float(effects()[name, column]['size']):+.{digits}f}"

  def corrected(name, column):
    return f"{float(effects()[name, column]['corrected p']):.2g}"

  test = "BLEU test"
  yield f"{size('cross', test)} on the test split, and {size('decoder', test)} in decoder"
  yield f"The encoder's effect, {size('encoder', test)}, has an interval"
  yield f"(corrected p {corrected('encoder', test)});"
  depth = size("encoder", "BLEU depth"), corrected("encoder", "BLEU depth")
  yield f"on deeper sentences it is ({depth[0]}, corrected p {depth[1]})"
  published = [
    float(effects()[name, test]["published"]) for name in ("encoder", "decoder", "cross")
  ]
  yield "published effects on BLEU are {:+.2f}, {:+.2f} and {:+.2f}".format(*published)
  lower = size("encoder", "BLEU combination"), size("encoder", "BLEU attractor")
  yield f"({lower[0]} and {lower[1]}, within their intervals)"
  bleu = {row: mean_of(TABLE_51, row, "test", "bleu") for row in PLACES}
  less = [bleu[row] - bleu["enc+x"] for row in ("dec", "enc+dec")]
  yield f"on the test split it is {less[0]:.1f} and {less[1]:.1f} below them"


def over_formats(facts):
  formats = ("multiple_choice", "yes_no", "extractive", "abstractive")
  each = [seeds(WORLDS, "NeMoT", "test", f"exact_match/{kind}/{facts}") for kind in formats]
  return [sum(values) / len(values) for values in zip(*each, strict=True)]


def first_world_sentences():
  """README has the same figures in short."""
  one, two = (interval(over_formats(facts), 1) for facts in (1, 2))
  yield f"{one} % with one fact and {two} % with two"


def world_sentences():
  (words,) = (
    row
    for row in record(f"{WORLDS}/baselines.json")["rows"]
    if (row["baseline"], row["split"]) == ("logistic regression", "test")
  )
  choice, yes_no, extractive = (
    f"{words[f'exact_match/{kind}/1']:.1f} %"
    for kind in ("multiple_choice", "yes_no", "extractive")
  )
  yield f"answers {choice} of choices, {yes_no} of yes/no questions and {extractive} of extractive"
  choices = seeds(WORLDS, "decoder", "test", "exact_match/multiple_choice/1")
  yield f"the decoder has {choices[1]:.0f} % of choices with one fact right in seed 1"
  asked = seeds(WORLDS, "NeMoT", "test", "exact_match/yes_no/1")
  yield f"NeMoT {asked[0]:.0f} % of yes/no questions in seed 0 and {asked[2]:.0f} % in seed 2"
  least = min(
    float(row["detectable"])
    for row in lines_of(f"{WORLDS}/numbers.csv")
    if row["column"] == "score test"
  )
  yield f"would have to differ by {least:.0f} points and more"
  lost = [
    mean_interval(seeds(WORLDS, row, "test", "score")).mean
    - mean_interval(seeds(WORLDS, row, "names", "score")).mean
    for row in ("NeMoT", "gate off", "decoder")
  ]
  yield f"cost {min(lost):.0f} to {max(lost):.0f} points of the mean score"
  yield (
    f"it answers {interval(over_formats(1), 1)} % with one fact and"
    f" {interval(over_formats(2), 1)} % with two"
  )
  scores = []
  for row in ("NeMoT", "gate off", "decoder"):
    first, second, third = (f"{score:.1f}" for score in seeds(WORLDS, row, "test", "score"))
    scores.append(f"{first}, {second} and {third} ({row})")
  yield f"Mean scores are {', '.join(scores)}"


def roberta_sentences():
  folder = "roberta/public_domain"
  plain, routed = (seeds(folder, row, "test", "loss") for row in ("none", "enc"))
  (least,) = (
    row["detectable"]
    for row in lines_of(f"{folder}/numbers.csv")
    if (row["row"], row["column"]) == ("enc", "loss test")
  )
  unigram = seeds(folder, "none", "test", "unigram")[0]
  gains = [unigram - loss for loss in plain + routed]
  yield f"Three seeds of the plain model lie {max(plain) - min(plain):.2f} nats apart"
  yield f"could find a difference of {float(least):.2f} nats at the earliest"
  yield f"are {math.log(10.15 / 10.04):.3f} nats apart"
  yield f"learns from its context, by {min(gains):.2f} to {max(gains):.2f} nats"
  yield f"(unigram) is {unigram:.3f}"


def speedrun_sentences():
  def each(kind, part="test", value="bleu"):
    return [split(f"speedrun/{kind}-seed{n}.json", part)[value] for n in range(3)]

  losses = (
    "{:.3f}, {:.3f} and {:.3f}".format(*each(kind, "valid", "loss")) for kind in ("cah", "plain")
  )
  yield f"Validation losses are {next(losses)}, and {next(losses)} without competition"
  yield f"that of the first row is {split('tatoeba/cah-seed0.json', 'valid')['loss']:.3f}"
  competing, plain = each("cah"), each("plain")
  assert min(competing + plain) > 50
  yield "each seed is above 50.0"
  found = paired_test(competing, plain)
  assert found.p > 0.05
  yield f"{interval([a - b for a, b in zip(competing, plain, strict=True)], 2)} BLEU by seed"
  yield f"Less than {detectable(found.deviation, 3):.1f} BLEU"
  sizes = [record(f"speedrun/{kind}-seed0.json")["parameters"] for kind in ("cah", "plain")]
  yield f"{sizes[0]:,} for {sizes[1]:,}"
  short = record("speedrun/3000-steps-seed0.json")
  valid, test = (
    split("speedrun/3000-steps-seed0.json", part)["bleu"] for part in ("valid", "test")
  )
  minutes = short["train_seconds"] / 60
  yield f"{valid:.1f} on validation, {test:.2f} on the test after {minutes:.1f} minutes"


def speedrun_in_short():
  scores = [split(f"speedrun/cah-seed{n}.json")["bleu"] for n in range(3)]
  minutes = [record(f"speedrun/cah-seed{n}.json")["train_seconds"] / 60 for n in range(3)]
  plain = [split(f"speedrun/plain-seed{n}.json")["bleu"] for n in range(3)]
  with_and_without = statistics.mean(scores), statistics.mean(plain)
  yield "BLEU is {:.1f} with competition and {:.1f} without".format(*with_and_without)
  assert 14.5 < min(minutes) < max(minutes) < 18


def benchmark_sentences():
  ways = ("training", "evaluation")
  ours = [ratio("recoding-cpu", f"{way}: ours / PyTorch, plain") for way in ways]
  yield f"takes {ours[0]} of the time of `torch.nn.LSTM`'s, its evaluation {ours[1]}"
  small = {claim["name"]: claim for claim in record("benchmarks/recoding-cpu.json")["claims"]}
  met = [name for name, claim in small.items() if claim["met"]]
  assert met == [
    "evaluation: ours / PyTorch, plain",
    "evaluation, 256 streams: surprisal / plain",
    "evaluation: entropy of 8 / plain",
  ]
  yield "that of evaluation in 256 streams is met, 1.66, and that of 8 samples, 11.04"


def modules_and_episodes():
  modules, episodes = "rims-cpu", "maml-cpu"
  yield f"active, takes {ratio(modules, 'modules / LSTM of as many units')} times"
  loop, vmapped = "ours / PyTorch's loop over modules", "our time / PyTorch's"
  yield f"and {ratio(modules, loop)} times as long as a loop"
  yield f"takes {ratio(episodes, vmapped)} of PyTorch's time with `vmap`"
  yield f"and {median(episodes, vmapped + ', one by one')} of that task by task"
  yield f"it takes {median(episodes, 'first order / second order')} of that to the second"


def step_sentences():
  file, small, recipe = "transformer-training-cpu", "small model, 128 x 16", "recipe, 64 x 32"
  for name in (small, recipe):
    yield ratio(file, f"{name}: our time / PyTorch eager's")
    yield ratio(file, f"{name}: ours, products in bfloat16 / in float32")
    yield ratio(file, f"{name}: the same / PyTorch's in bfloat16, autocast eager")
  yield f"competing heads {ratio(file, f'{recipe}: encoder heads compete / plain')} in the encoder"
  yield f"and {ratio(file, f'{recipe}: all heads compete / plain')} everywhere"
  yield f"first step {ratio('startup-cpu', 'seconds to the first step')} s after"
  empty = record("benchmarks/startup-cpu.json")["facts"][0]
  yield f"({empty.removeprefix('with empty caches: ')} with"


def ptb_sentences():
  path = "ptb/plain-650-seed0.json"
  valid, test = (split(path, name)["perplexity"] for name in ("valid", "test"))
  yield f"it has {valid:.2f} on validation and {test:.2f} on test"


def later_sentences():
  later = [float(row["surprisal"]) for row in lines_of("garden-paths/surprisal-5/later.csv")]
  own = [float(row["surprisal"]) for row in lines_of("garden-paths/nll-1/later.csv")]
  nll = [float(row["error"]) for row in lines_of("garden-paths/nll-1/later.csv")]
  assert f"{later[1]:.3f}" == f"{later[3]:.3f}"
  yield f"third token after it falls by {-later[1]:.3f} bits, beyond the intervals"
  yield f"that of the second falls by {-later[2]:.3f}, within them"
  yield f"surprisal rises by {later[0]:.1f} bits on average"
  yield f"step lowers surprisal by {-own[0]:.1f} bits"
  yield (
    f"worse by {nll[1]:.2f} nats and the two after it by {nll[2]:.2f} and {nll[3]:.2f};"
    f" the fourth is better by {-nll[4]:.2f}"
  )


def layer_sentences():
  layers = record("benchmarks/routing-compiled-2026-11-23.json")["tables"]
  forward, training = (layers["h100"][f"layer plain, {way}"] for way in ("forward", "training"))
  yield f"move {forward['MiB']:,.0f} MiB forward and {training['MiB']:,.0f} in training"
  forward, training = (layers["v5e"][f"layer plain, {way}"] for way in ("forward", "training"))
  yield f"it is {forward['MiB']:,.0f} and {training['MiB']:,.0f} for"
  forward, training = (layers["v5e"][f"layer competing, {way}"] for way in ("forward", "training"))
  yield f"attention, is {forward['MiB']:,.0f} and {training['MiB']:,.0f}"


def cross_attention_sentences():
  tables = record("benchmarks/attention-compiled.json")["tables"]

  def moved(device):
    found = tables[device]
    return [
      f"{found[f'cross, {layer}, {way}']['MiB']:,.0f}"
      for layer in ("plain", "float32")
      for way in ("forward", "training")
    ]

  yield "moves {} MiB forward and {} in training, and {} and {} where".format(*moved("v5e"))
  yield "moves {} MiB forward and {} in training, and {} and {} where heads".format(*moved("h100"))


def chosen_attention_sentences():
  found = record("benchmarks/chosen-attention-compiled.json")["tables"]["h100"]
  kernels = record("benchmarks/attention-registers-positions.json")["tables"]["h100"]
  assert len(kernels) == 16
  assert not any(row["spilt"] for row in kernels.values())

  def moved(way, which):
    one, other = (found[f"{way}, rows of {time}, {which}"]["MiB"] for time in (1024, 4096))
    assert round(one) == round(other)
    for time in (1024, 4096):
      assert abs(found[f"{way}, rows of {time}, causal, {which}"]["MiB"] / one - 1) < 0.01
    return one

  chosen, every = (
    [moved(way, which) for which in ("forward", "training")] for way in ("chosen", "all")
  )
  yield "moves {:,.0f} MiB forward and {:,.0f} in training, and {:,.0f} and {:,.0f} without".format(
    *chosen, *every
  )
  more = [mine - theirs for mine, theirs in zip(chosen, every, strict=True)]
  yield "{:.0f} and {:.0f} MiB more".format(*more)
  # An H100's memory moves 3,352 GB in a second.
  yield "take {:.0f} and {:.0f} microseconds".format(*(one * 2**20 / 3.352e6 for one in more))


def cached_attention_sentences():
  found = record("benchmarks/cached-attention-compiled.json")["tables"]["h100"].values()
  most = max(row["kernel"] / row["keys and values"] for row in found)
  yield f"it moves at most {most:.2f} times the keys and values"
  on_tpu = record("benchmarks/cached-attention-compiled.json")["tables"]["v5e"]
  one, five = (on_tpu[f"{count} queries, heads of 64, bfloat16"]["XLA"] for count in (1, 5))
  yield f"XLA's program moves {one:.0f} MiB for one query and {five:.0f} for five"


def signal_sentences():
  scores = {r: seeds("recoding/ptb", r, "test", "perplexity")[0] for r in cells("recoding/ptb")}
  gains = {row: scores["none"] - value for row, value in scores.items()}
  known = [
    gain for row, gain in gains.items() if row.split(",")[0] in ("surprisal", "argmax", "nll")
  ]
  yield f"is better by {min(known):.0f} to {max(known):.0f} points here"
  lost = [
    -gains[f"{signal}, {step}"]
    for signal in ("MC dropout", "ensemble")
    for step in ("constant", "learned")
  ]
  yield "lie {:+.1f}, {:+.1f}, {:+.1f} and {:+.1f}".format(*lost)
  yield "by {:.0f} and {:.0f} on the".format(*lost[2:])


def pretraining_sentences():
  one = record("nemot-pretrain/small-seed0.json")
  yield f"One run (seed 0), {one['train_seconds'] / 60:.0f} minutes on one core"
  yield f"{one['parameters'] / 1e6:.1f} million parameters"
  minutes = [
    f"{cells('nemot-3.1/small')[row][0]['train_seconds'] / 60:.0f}"
    for row in ("NeMoT", "gate off", "decoder")
  ]
  yield f"(seed 0; {minutes[0]}, {minutes[1]} and {minutes[2]} minutes of one core"


SENTENCES = [
  ("README.md", first_world_sentences),
  ("docs/nemot.md", pretraining_sentences),
  ("docs/speedrun.md", speedrun_sentences),
  ("README.md", speedrun_in_short),
  ("docs/speed.md", step_sentences),
  ("README.md", commands_in_short),
  ("docs/generalisation.md", longest_commands),
  ("docs/recoding.md", signal_sentences),
  ("docs/plasticity.md", longer_associations),
  ("docs/rims.md", longer_copying),
  ("docs/rims.md", digits_ahead),
  ("docs/generalisation.md", copying_effects),
  ("docs/few_shot.md", raw_examples),
  ("docs/leopard.md", leopard_differences),
  ("docs/generalisation.md", ingredients_in_short),
  ("docs/generalisation.md", hinted_in_short),
  ("docs/tables.md", trial_in_short),
  ("docs/competing_experts.md", specialisation),
  ("docs/training_regimes.md", routers_learned),
  ("docs/independent_mechanisms.md", mechanisms_learned),
  ("docs/tables.md", factorial_sentences),
  ("docs/tables.md", ablation_sentences),
  ("docs/tables.md", roberta_sentences),
  ("docs/nemot.md", world_sentences),
  ("docs/recoding.md", ptb_sentences),
  ("docs/recoding.md", later_sentences),
  ("docs/kernels.md", layer_sentences),
  ("docs/kernels.md", cross_attention_sentences),
  ("docs/generalisation.md", context_logic_order),
  ("docs/kernels.md", cached_attention_sentences),
  ("docs/kernels.md", chosen_attention_sentences),
  ("docs/speed.md", benchmark_sentences),
  ("docs/speed.md", modules_and_episodes),
  ("docs/generalisation.md", string_edits),
  ("docs/generalisation.md", two_words_more),
  ("docs/generalisation.md", arithmetic_in_short),
]


@pytest.mark.parametrize(("page", "sentences"), SENTENCES, ids=lambda v: getattr(v, "__name__", v))
def test_figures_of_sentences_are_those_of_their_files(page, sentences):
  prose = prose_of(page).replace("*", "")
  missing = [text for text in map(tidy, sentences()) if text.replace("*", "") not in prose]
  assert missing == []


def test_no_interaction_of_places_is_beyond_chance_and_only_cross_is_on_every_split():
  beyond = {}
  for (name, column), row in effects().items():
    if column.startswith("BLEU") and float(row["corrected p"]) <= 0.05:
      beyond.setdefault(name, []).append(column)
  assert not [name for name in beyond if " x " in name]
  everywhere = [name for name, columns in beyond.items() if len(columns) == 1 + len(SHIFTED)]
  assert everywhere == ["cross"]
  interactions = [r for (name, _), r in effects().items() if " x " in name]
  assert min(float(row["corrected p"]) for row in interactions) > 0.05


def test_kernels_compiled_for_accelerators_are_those_of_their_file():
  rows = record("benchmarks/kernels-aot.json")["rows"]
  names = ("device", "type", "heads", "design", "pass", "GFLOP", "MiB", "model us", "XLA us",
           "registers", "spilt")  # fmt: skip
  expected = []
  for row in rows:
    values = [row[name] for name in names]
    expected.append([
      "-" if v is None else f"{v:.1f}" if isinstance(v, float) else str(v) for v in values
    ])  # fmt: skip
  block = (ROOT / "docs" / "kernels-aot.md").read_text().split("```")[1]
  shown = [re.split(r"\s{2,}", line.strip()) for line in block.strip().splitlines()][1:]
  assert compare(shown, expected) == []
