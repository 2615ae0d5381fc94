"""Whether a report fits a screen 390 pixels wide, from its markup and style alone."""

import html.parser
import re

WIDTH = 390  # CSS pixels
_REM = 16


class _Boxes(html.parser.HTMLParser):
  """Finds what may be wide and is in no box that scrolls."""

  def __init__(self):
    super().__init__()
    self.open: list[tuple[str, set[str]]] = []
    self.loose: list[str] = []
    self.viewport = ""

  def handle_starttag(self, tag, attrs):
    found = {name: value or "" for name, value in attrs}
    if tag == "meta":
      self.viewport = found.get("content", "") if found.get("name") == "viewport" else self.viewport
      return
    inside = any("scroll" in classes for _, classes in self.open)
    if tag in ("table", "svg", "img", "canvas", "iframe") and not inside:
      self.loose.append(tag)
    self.open.append((tag, set(found.get("class", "").split())))

  def handle_endtag(self, tag):
    while self.open and self.open.pop()[0] != tag:
      pass


def assert_fits_a_phone(text: str) -> None:
  """Fails where a page could be wider than its screen, or could not be enlarged by hand."""
  boxes = _Boxes()
  boxes.feed(text)
  assert boxes.loose == [], "all tables and pictures scroll in a box of their own"
  settings = dict(part.strip().split("=") for part in boxes.viewport.split(","))
  assert settings == {"width": "device-width", "initial-scale": "1"}
  rules = _rules(re.sub(r"@media print \{.*?\n\}", "", _style(text), flags=re.DOTALL))
  assert ("overflow-x", "auto") in rules[".scroll"]
  assert ("overflow-wrap", "anywhere") in rules["body"]
  assert {("max-width", "100%"), ("height", "auto")} <= rules["figure svg"]
  for selector, properties in rules.items():
    for name, value in properties:
      in_box = selector.startswith((".scores", ".numbers", ".pairs", ".picture:focus"))
      if name in ("width", "min-width") and not in_box:
        assert _pixels(value) <= WIDTH - 32, (selector, name, value)
      if name == "white-space" and value == "nowrap":
        assert in_box, (selector, value)


def _style(text: str) -> str:
  (found,) = re.findall(r"<style>(.*?)</style>\n</head>", text, flags=re.DOTALL)
  return found


def _rules(style: str) -> dict[str, set[tuple[str, str]]]:
  """Selector -> (property, value) pairs, whatever media query they stand in."""
  rules: dict[str, set[tuple[str, str]]] = {}
  for selectors, body in re.findall(r"([^{};]+)\{([^{}]*)\}", style):
    pairs = {
      (name.strip(), value.strip())
      for name, _, value in (line.partition(":") for line in body.split(";") if ":" in line)
    }
    for selector in selectors.split(","):
      rules.setdefault(selector.strip(), set()).update(pairs)
  return rules


def _pixels(value: str) -> float:
  match = re.fullmatch(r"([\d.]+)(rem|px)", value)
  return float(match[1]) * (_REM if match[2] == "rem" else 1) if match else 0.0
