"""Formulas in Markdown and docstrings become MathML, which browsers draw without a script.

`.. math:: TEX` with indented lines after it is a formula of its own, :math:`TEX` one in a line.
"""

import re

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor

_BLOCK = re.compile(
  r"^(?P<indent> *)\.\. math::(?P<first>[^\n]*)\n?(?P<more>(?:(?P=indent) +\S[^\n]*\n?|[ ]*\n)*)",
  re.MULTILINE,
)
_UNKNOWN = re.compile(r"\\[A-Za-z]+")


def mathml(tex: str, display: str) -> str:
  """The formula as MathML.

  Raises:
    ValueError: it holds a command that the converter does not know.
  """
  result = convert(tex, display=display)
  if unknown := _UNKNOWN.search(result):
    raise ValueError(
      f"the formula {tex!r} has {unknown[0]}, which is not known; write it otherwise"
    )
  return result


def formulas(more: str) -> list[str]:
  """The formulas of a block; an empty line separates two of them."""
  return [" ".join(part.split()) for part in re.split(r"\n\s*\n", more) if part.strip()]


class _Blocks(Preprocessor):
  def run(self, lines: list[str]) -> list[str]:
    return _BLOCK.sub(self._replace, "\n".join(lines) + "\n").split("\n")

  def _replace(self, match: re.Match[str]) -> str:
    parts = (mathml(tex, "block") for tex in formulas(match["first"] + "\n" + match["more"]))
    html = "".join(f'<div class="formula">{part}</div>' for part in parts)
    return f"\n{match['indent']}{self.md.htmlStash.store(html)}\n\n"


class _Inline(InlineProcessor):
  def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:
    return self.md.htmlStash.store(mathml(m[1], "inline")), m.start(0), m.end(0)


class MathExtension(Extension):
  """Both kinds of formulas."""

  def extendMarkdown(self, md: Markdown) -> None:
    """Adds them before fenced code and before code in a line."""
    md.preprocessors.register(_Blocks(md), "math-block", 22)
    md.inlinePatterns.register(_Inline(r":math:`([^`]+)`", md), "math-inline", 200)
