"""What a class of message tells its receiver: one statement, kept at the class (`Message.leakage`).

Tables in the documentation, `treaty disclosures`, `disclosures_` and the expectations of audits are made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Form = Literal["nothing", "encrypted", "masked", "noisy", "aggregated", "exact", "control"]
"""In which form the content arrives at the receiver.

========== =============================================================================================
nothing    random numbers, commitments, receipts: nothing that it did not know
encrypted  ciphertexts whose key it does not have
masked     numbers under masks or in shares that it cannot remove alone
noisy      under the noise of a differentially private mechanism
aggregated sums, counts, quantiles or a model: over many rows, or over several parties
exact      as it is, about single rows or single splits
control    what is settled about the job: sizes, keys, options, who takes part, progress; nothing of single rows
========== =============================================================================================
"""


@dataclass(frozen=True, slots=True)
class MessageLeakage:
    """What the receiver of a message learns from it.

    Attributes
    ----------
    tells : str
        What it learns, in a few words. What parties that collude learn is stated by the system.
    form : str
        See `Form`.
    guard : str
        The option that lessens it; empty where there is none.
    """

    tells: str
    form: Form
    guard: str = ""


Leakages = MessageLeakage | Mapping[str, MessageLeakage]
"""What is stated at a class of message: once, or by the name of what it depends on."""
