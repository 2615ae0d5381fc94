"""The built site asks nothing of a network: every file that a page loads is in the site."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)")


class _Page(HTMLParser):
  def __init__(self):
    super().__init__()
    self.files: list[str] = []

  def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
    values = dict(attrs)
    file = values.get(_LOADED.get(tag, ""))
    # These name pages for readers and search engines, and load nothing.
    if file and not {"canonical", "prev", "next"} & set((values.get("rel") or "").split()):
      self.files.append(file)


def faults(site: Path) -> list[str]:
  """What a page or a style sheet loads that is not in the site."""
  found = []
  for path in sorted(site.rglob("*.html")):
    page = _Page()
    page.feed(path.read_text())
    name = path.relative_to(site)
    for file in page.files:
      parts = urlsplit(file)
      if parts.scheme == "data":
        continue
      if parts.scheme or parts.netloc:
        found.append(f"{name} loads {file} from a network")
      # The page for addresses that are not there is served by a web server alone.
      elif name.name != "404.html" and not (path.parent / unquote(parts.path)).is_file():
        found.append(f"{name} loads {file}, which is not there")
  for path in sorted(site.rglob("*.css")):
    urls = _STYLE.findall(path.read_text())
    found += [f"{path.relative_to(site)} loads {url} from a network" for url in urls]
  return found
