"""What OpenAPI and the page `/docs` say of requests and answers; made from the model, as the reader of requests is."""

from __future__ import annotations

from html import escape
from typing import Any

from treaty.data.columns import Category
from treaty.serving.service import PredictionService

_OF_TYPES = {str: "string", bool: "boolean", int: "number", float: "number"}
_STYLE = """
:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }
pre { overflow-x: auto; padding: .8rem; border: 1px solid; border-radius: .3rem; }
td, th { text-align: left; vertical-align: top; padding: .1rem 1rem .1rem 0; overflow-wrap: anywhere; }
"""
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SHOWN = 20  # categories of a column on the page


def request_schema(service: PredictionService) -> dict[str, Any]:
    """Return the JSON schema of a request's body."""
    schema, limits = service.model.schema, service.limits
    cells = dict(zip(schema.names, map(_cell, schema.categories), strict=True))
    row = {"type": "object", "additionalProperties": False, "required": list(cells), "properties": cells}
    properties: dict[str, Any] = {"rows": {"type": "array", "minItems": 1, "maxItems": limits.rows, "items": row}}
    if service.waits:
        properties["ids"] = {
            "type": "array", "items": {"type": "string"},
            "description": f"Of each row, the id that {', '.join(service.model.needs)} know it by.",
        }  # fmt: skip
    return {"type": "object", "additionalProperties": False, "required": list(properties), "properties": properties}


def answer_schema(service: PredictionService) -> dict[str, Any]:
    classes = service.model.classes
    kinds = {"number"} if classes is None else {_OF_TYPES[type(value)] for value in classes}
    row: dict[str, Any] = {"prediction": {"type": sorted(kinds)}}
    if classes is not None:
        row["prediction"]["enum"] = classes
        row |= {f"probability_{name}": {"type": "number"} for name in classes}
    return {
        "type": "object",
        "required": ["model", "fallback", "predictions"],
        "properties": {
            "model": {"type": "string"},
            "fallback": {"type": "boolean", "description": "Whether partners' columns were left out."},
            "predictions": {"type": "array", "items": {"type": "object", "properties": row}},
            "caution": {"type": "string", "description": "There where probabilities are unreliable."},
        },
    }


def predict_operation(service: PredictionService) -> dict[str, Any]:
    """Return what OpenAPI says of ``POST /predict``."""
    refused = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {"type": "string"},
            "row": {"type": "integer", "description": "Counted from 0."},
            "column": {"type": "string"},
        },
    }
    said = {
        "400": "No JSON.", "401": "No key, or nobody's.", "408": "The body did not arrive in time.",
        "413": "Too many bytes.", "415": "Another content type.",
        "422": "Rows that do not fit the model; row and column are named.",
        "503": "Too many requests under way, or partners that are needed and absent.",
    }  # fmt: skip
    answers = {status: {"description": why, "content": _json(refused)} for status, why in said.items()}
    return {
        "summary": "Predict rows",
        "requestBody": {"required": True, "content": _json(request_schema(service))},
        "responses": {"200": {"description": "Predictions, in the order of the rows.",
                              "content": _json(answer_schema(service))}, **answers},
    }  # fmt: skip


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def docs_page(service: PredictionService) -> str:
    """Return a page for people: how to ask, with which columns. It has no script and asks no other server."""
    model = service.model
    names, kinds, categories = model.schema.names, model.schema.kinds, model.schema.categories
    rows = "".join(
        f"<tr><td>{escape(name)}<td>{kind}<td>{escape(_listed(values))}"
        for name, kind, values in zip(names, kinds, categories, strict=True)
    )
    notes = []
    if service.waits:
        notes.append(f"Predictions are made with {', '.join(model.needs)}: give “ids” of the rows beside “rows”.")
    elif model.needs and service.falls_back:
        notes.append(
            f"The columns of {', '.join(model.needs)} are left out of predictions here; answers say “fallback”: true."
        )
    elif model.needs:
        notes.append(f"Predictions need {', '.join(model.needs)}, and they are not connected: /predict answers 503.")
    said = "".join(f"<p>{escape(note)}" for note in notes)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Predictions</title><style>{_STYLE}</style>
<h1>Predictions</h1>
<p>Model {escape(model.part.model_id)} of {escape(model.part.party)}: {escape(model.part.summary())}.{said}
<h2>POST /predict</h2>
<p>Up to {service.limits.rows} rows and {service.limits.body_bytes} bytes a request. Every row has all columns; null is
a value that is not known. Where keys are asked for, give yours as a header.
<pre>curl -H 'Authorization: Bearer KEY' -H 'Content-Type: application/json' \\
  -d '{escape(service.shape, quote=False)}' .../predict</pre>
<h2>Columns</h2>
<table><tr><th>name<th>kind<th>categories{rows}</table>
<h2>More</h2>
<p><a href="model">/model</a>: the same as JSON. <a href="openapi.json">/openapi.json</a>: for programs.
<a href="metrics">/metrics</a>: counts, for Prometheus. <a href="health">/health</a>: whether the server answers.
</html>"""


def _cell(values: tuple[Category, ...] | None) -> dict[str, Any]:
    if values is None:
        return {"type": ["number", "boolean", "null"]}
    kinds = sorted({_OF_TYPES[type(value)] for value in values} or {"string"})
    return {"type": [*kinds, "null"], "examples": list(values[:_SHOWN])}


def _listed(values: tuple[Category, ...] | None) -> str:
    if values is None:
        return ""
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return ", ".join(map(str, values[:_SHOWN])) + more
