"""HTML pages taken apart, for tests of the node's page and of reports."""

from __future__ import annotations

from html.parser import HTMLParser


class Parsed(HTMLParser):
    """Every tag must be closed in its turn; collects tags with their attributes, and the text of each section."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self.sections[dict(attrs).get("id") or dict(attrs)["aria-labelledby"] or ""] = ""
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "section" in self.open:
            self.sections[list(self.sections)[-1]] += "".join(
                f"{words} " for words in [" ".join(data.split())] if words
            )
