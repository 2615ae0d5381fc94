"""Evaluation of an LSTM language model in so many streams side by side, recoded and plain.

    python -m benchmarks.streams [--quick] [--json FILE] [--device gpu]

Needs the environment of `make test-peers`. The model of `benchmarks.recoding`; every run reads the
same number of tokens, 35 of every stream at a time. On it rests how many streams evaluation chooses
at most (`rows_of_evaluation` in `compmod_jax/data/streams.py`). Two minutes on 2 cores.
"""

import dataclasses

from benchmarks import common
from benchmarks.recoding import evaluation, sizes

STREAMS = (16, 32, 64, 128, 256)
ROUNDS = 10


def main() -> None:
  options = common.options(__doc__).parse_args()
  report = common.start("Streams of evaluation", options)
  case = sizes(options)
  params, most = case.params(), STREAMS[-1]
  for signal in ("none", "surprisal"):
    runs = {}
    for count in STREAMS:
      stretch = evaluation(dataclasses.replace(case, rows=count), params, signal=signal)
      runs[f"{count} streams"] = lambda stretch=stretch, times=most // count: [
        stretch() for _ in range(times)
      ]
    amount = most * case.time
    seconds = report.measure(signal, runs, ROUNDS, amount=amount, unit="tokens", warm_up=1)
    for count in STREAMS[:-1]:
      name = f"{signal}: time in {count} / in {most} streams"
      report.claim(name, seconds[f"{count} streams"], seconds[f"{most} streams"])
  report.finish()


if __name__ == "__main__":
  main()
