"""HTML made in Python: whatever is not `Html` is escaped when it is put into a tag, so that a name stays a name."""

from __future__ import annotations

import html
from collections.abc import Iterable

STYLE = """
:root{color-scheme:light dark;--ink:#1b2330;--dim:#5a6474;--paper:#f6f7f9;--card:#fff;--line:#d9dee6;--link:#1c5fb0;
--good:#1a6e3c;--bad:#a8261f;--busy:#1c5fb0;--wait:#80560a}
@media screen and (prefers-color-scheme:dark){:root{--ink:#e5e9f0;--dim:#a0aabb;--paper:#12161d;--card:#1b212b;
--line:#333c4a;--link:#82b4f5;--good:#6fcf97;--bad:#ff8f87;--busy:#82b4f5;--wait:#e5b85c}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:64rem;font:1rem/1.5 system-ui,sans-serif;color:var(--ink);
background:var(--paper);overflow-wrap:anywhere}
header{margin-bottom:1rem}
h1{font-size:1.5rem;line-height:1.3;margin:0}
h2{font-size:1.15rem;margin:2rem 0 .6rem}
h3{font-size:1rem;margin:0;display:flex;flex-wrap:wrap;gap:.2rem .7rem;align-items:baseline}
h4{font-size:.875rem;margin:1rem 0 .2rem}
p{margin:.2rem 0}
a{color:var(--link)}
a:focus-visible{outline:2px solid;outline-offset:2px}
code{font:.875em ui-monospace,monospace}
ul{margin:0;padding:0 0 0 1.2rem}
article,.rows{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.8rem 1rem;
margin:0 0 .8rem}
footer{margin-top:2.5rem;border-top:1px solid var(--line);padding-top:.6rem}
.dim,footer,.none{color:var(--dim);font-size:.875rem}
"""
"""What Treaty's pages look like in common, on a phone as on a desk, light or dark."""


class Html(str):
    """Text that is HTML already."""


def tag(name: str, *inside: str, **attributes: str | None) -> Html:
    """Return an element; what is inside is escaped unless it is `Html`. ``look`` stands for the attribute ``class``."""
    given = {"class" if key == "look" else key: value for key, value in attributes.items() if value is not None}
    words = "".join(f' {key}="{html.escape(value)}"' for key, value in given.items())
    return Html(f"<{name}{words}>{joined(inside)}</{name}>")


def joined(parts: Iterable[str]) -> Html:
    """Return parts one after another, escaped unless they are `Html`."""
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts))
