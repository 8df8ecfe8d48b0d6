"""The description of requests and answers for programs (OpenAPI) and for people (``/docs``), made from the model."""

from __future__ import annotations

from typing import Any

from treaty.data.columns import Category
from treaty.report.page import templates
from treaty.serving.service import PredictionService

_OF_TYPES = {str: "string", bool: "boolean", int: "number", float: "number"}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Categories of a column on the page.
_SHOWN = 20


def request_schema(service: PredictionService) -> dict[str, Any]:
    """Return the JSON schema of a request's body."""
    schema, limits = service.model.schema, service.limits
    cells = dict(zip(schema.names, map(_cell, schema.categories), strict=True))
    row = {"type": "object", "additionalProperties": False, "required": list(cells), "properties": cells}
    properties: dict[str, Any] = {"rows": {"type": "array", "minItems": 1, "maxItems": limits.rows, "items": row}}
    if service.waits:
        properties["ids"] = {
            "type": "array", "items": {"type": "string"},
            "description": f"For each row, its id at {', '.join(service.model.needs)}.",
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
            "caution": {"type": "string", "description": "Present if probabilities are unreliable."},
        },
    }


def predict_operation(service: PredictionService) -> dict[str, Any]:
    """Return the OpenAPI description of ``POST /predict``."""
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
        "400": "No JSON.", "401": "No key, or an unknown one.", "408": "The body did not arrive in time.",
        "413": "Too many bytes.", "415": "Another content type.",
        "422": "Rows that do not fit the model; the answer names row and column.",
        "503": "Too many requests under way, or needed partners are absent.",
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
    """Return a page for people: how to send requests, with which columns."""
    schema = service.model.schema
    columns = zip(schema.names, schema.kinds, schema.categories, strict=True)
    page = templates("treaty.serving").get_template("docs.html")
    return page.render(service=service, model=service.model, columns=columns, most=_SHOWN)


def _cell(values: tuple[Category, ...] | None) -> dict[str, Any]:
    if values is None:
        return {"type": ["number", "boolean", "null"]}
    kinds = sorted({_OF_TYPES[type(value)] for value in values} or {"string"})
    return {"type": [*kinds, "null"], "examples": list(values[:_SHOWN])}
