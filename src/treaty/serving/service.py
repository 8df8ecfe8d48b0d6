"""What is answered to a request, whatever carries it: rows in, predictions out, or a refusal that says why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from numpy.typing import NDArray

from treaty.data.table import Table
from treaty.errors import LocalProtocolError, TreatyError
from treaty.serving.models import Margins, ServedModel
from treaty.serving.requests import PredictionRequest, Refused, RequestReader

logger = logging.getLogger(__name__)

Partners = Callable[[Sequence[str], Table], Margins]
"""Predicts with the other parties: ids of rows and own columns in, margins (n_rows, n_outputs) of the whole model out.

It may be called from several threads at once. It raises a `TreatyError` where it cannot.
"""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How much is taken: rows and bytes of one request, requests under way, seconds for a request's body to arrive."""

    rows: int = 10_000
    body_bytes: int = 8 << 20
    under_way: int = 64
    body_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class PredictionResponse:
    """The body of an answer in JSON, and what is counted of it."""

    content: bytes
    n_rows: int
    fallback: bool


class PredictionService:
    """Answers requests with a model's predictions.

    Attributes
    ----------
    waits : bool
        Whether an answer waits for other parties.
    shape : str
        The form of a request, in JSON.
    """

    def __init__(
        self,
        model: ServedModel,
        limits: RequestLimits | None = None,
        *,
        partners: Partners | None = None,
        fallback: bool = False,
        threads: int = 1,
    ) -> None:
        """`fallback`: predict without partners that are needed and absent; ConfigError where that is not possible."""
        self.model, self.limits = model, limits or RequestLimits()
        self._partners = partners if model.needs else None
        self.waits = self._partners is not None
        self._fallback = model.fallback() if fallback and model.needs else None
        self._reader = RequestReader(model.schema, max_rows=self.limits.rows, with_ids=self.waits)
        self.shape = self._reader.shape
        self._encoder, self._threads = msgspec.json.Encoder(), threads

    @property
    def falls_back(self) -> bool:
        """Whether rows are predicted without partners where these are needed and absent."""
        return self._fallback is not None

    def described(self) -> dict[str, Any]:
        """Return what `GET /model` says."""
        return self.model.described() | {
            "ids": self.waits, "fallback": self.falls_back, "max_rows": self.limits.rows,
            "max_bytes": self.limits.body_bytes,
        }  # fmt: skip

    def warm_up(self) -> None:
        """Predict a row of missing values, so that decoders and kernels are made before anybody waits for them."""
        nothing = {"rows": [dict.fromkeys(self.model.schema.names)]} | ({"ids": [""]} if self.waits else {})
        request = self._reader.read(self._encoder.encode(nothing))
        compute = self._fallback if self.model.needs else self.model.margins
        if compute is not None:
            self.model.predictions(compute(request.matrix, 1))

    def answer(self, content: bytes) -> PredictionResponse:
        """Answer the body of a request; raise `Refused` where that is not possible."""
        if self.model.needs and self._partners is None and self._fallback is None:
            raise Refused(503, self._without_partners())
        request = self._reader.read(content)
        margins, fallback = self._margins(request)
        told = {"model": self.model.part.model_id, "fallback": fallback, "predictions": self.model.predictions(margins)}
        caution = self.model.part.caution(margins)
        if caution is not None:
            told["caution"] = caution
        return PredictionResponse(self._encoder.encode(told), len(request.matrix), fallback)

    def _margins(self, request: PredictionRequest) -> tuple[Margins, bool]:
        """Return margins, and whether they were made without partners who are needed."""
        matrix = request.matrix
        if not self.model.needs:
            return self.model.margins(matrix, self._threads), False
        if self._partners is not None and request.ids is not None:
            try:
                return self._with_partners(self._partners, request.ids, matrix), False
            except TreatyError as error:
                logger.warning("a prediction with %s failed: %s", self._named(), error)
                if self._fallback is None:
                    said = f"no prediction with {self._named()} was made; this server's log says why"
                    raise Refused(503, said, retry_after=10) from None
        assert self._fallback is not None
        return self._fallback(matrix, self._threads), True

    def _with_partners(self, partners: Partners, ids: Sequence[str], matrix: NDArray[Any]) -> Margins:
        margins = partners(ids, self.model.table(matrix))
        if len(margins) != len(matrix):
            raise LocalProtocolError(f"expected margins of {len(matrix)} rows, got {len(margins)} - from the partners")
        return margins

    def _named(self) -> str:
        return ", ".join(self.model.needs)

    def _without_partners(self) -> str:
        return (
            f"this model predicts with {self._named()}, and they are not connected here: a part of it alone cannot "
            "predict. Predict in a batch with `treaty predict`, or, for worse predictions from own columns alone, "
            "start the server with --fallback own"
        )
