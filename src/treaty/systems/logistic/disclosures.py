"""What each party of a logistic regression learned, in words, for reports and before consent is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from treaty.systems.linear_options import LinearOptions

_FEW_COLUMNS = "of a party with one column they tell its weight up to the sign, with a few its weights up to a rotation"


def linear_disclosures(
    guest: str,
    hosts: Sequence[str],
    coordinator: str | None,
    options: LinearOptions,
    cipher: str,
    alone: Mapping[str, int] | None = None,
) -> dict[str, list[str]]:
    """Say in words what each party learned beyond its own data and its own weights.

    Parameters
    ----------
    guest : str
        The label holder.
    hosts : sequence of str
    coordinator : str or None
    options : LinearOptions
    cipher : {"lattice", "ou", "paillier"}
        The one it was trained under.
    alone : mapping of str to int or None
        Of each party, the rows that stand alone in their batch among its columns; None where they are not known.
    """
    everybody = "how many rows and prepared columns every party has, and how many epochs there were"
    one_host = len(hosts) == 1
    of_hosts = f"{hosts[0]}'s part" if one_host else "the sum of hosts' parts"
    if options.mode == "paper":
        return _with_test_key(_of_paper(guest, hosts, str(coordinator), everybody), coordinator, options)
    gradients = "of every batch the gradient of its own weights, and in quasi-Newton training of every "
    gradients += f"{options.period}th the Hessian's product with its own last steps; rows of a batch never change"
    coefficients = (
        "the coefficients of every step in the last steps, curvatures and the gradient, from which nearly all inner "
        "products of the joined vectors follow, and so "
        + ("the other's" if one_host else "all others'")
        + f" part of them; {_FEW_COLUMNS}"
    )
    counts = "; of every party with data, how many rows stand alone in their batch among its columns"
    learned = {
        guest: [
            everybody + counts,
            gradients + f": so {of_hosts} of X'u over its own columns",
            _of_rows_alone(f"{of_hosts} of the margins", guest, alone),
            "the mean loss of every epoch",
            f"at prediction, {of_hosts} of every row's margin",
        ]
    }
    if coordinator is None:
        learned[guest].append(
            f"of every step {of_hosts} of the inner products of steps, curvatures and gradients: their lengths and "
            f"angles; {_FEW_COLUMNS}"
        )
    else:
        learned[guest].append(coefficients)
    for host in hosts:
        learned[host] = [
            everybody + counts,
            gradients + ": linear equations about the residuals of the batch, at most one for each of its columns and "
            "batch that is about labels",
            _of_rows_alone("the labels", host, alone),
            coefficients,
        ]
        if cipher != "lattice" and coordinator is None:
            learned[host].append("of the others' columns, ciphertexts under keys of their owners")
    if coordinator is not None:
        learned[coordinator] = [
            everybody + ("" if cipher == "lattice" else "; the key"),
            "of every step the summed inner products of all parties' steps, curvatures and gradients: their lengths "
            "and angles, hence all weights up to a rotation, no party's slice; uniform numbers apart from that",
            "whether the loss rose by a tenth in an epoch",
        ]
        if cipher != "lattice":
            learned[guest].append(
                f"hosts' margins as ciphertexts under {coordinator}'s key: with its help it would have them, and from "
                "enough of them hosts' columns; the two must not collude"
            )
            for name in (guest, *hosts):
                what = "margins" if name == guest else "residuals, and so their labels,"
                learned[name].append(
                    f"if it deviates from the protocol, unnoticed: {what} of as many rows of a batch as it has "
                    f"columns, each epoch of others, by having {coordinator} open them; the lattice map fixes columns"
                )
    return _with_test_key(learned, coordinator, options)


def _with_test_key(
    learned: dict[str, list[str]], coordinator: str | None, options: LinearOptions
) -> dict[str, list[str]]:
    """Add what a key for tests is worth."""
    if options.insecure_test_key_bits is not None:
        for name in learned.keys() - {coordinator}:
            learned[name].append(
                f"whatever is sent to it encrypted, if it factors the key, which is for tests alone: "
                f"{options.insecure_test_key_bits} bits"
            )
    return learned


def _of_rows_alone(what: str, name: str, alone: Mapping[str, int] | None) -> str:
    rows = None if alone is None else alone.get(name)
    if rows == 0:
        return f"of no row {what} by itself: none stands alone in its batch among its columns"
    number = "rows, if there are such," if rows is None else "1 row," if rows == 1 else f"{rows} rows,"
    return f"from its gradients, {what} of {number} which stand alone in their batch among its columns"


def _of_paper(guest: str, hosts: Sequence[str], coordinator: str, everybody: str) -> dict[str, list[str]]:
    learned = {
        guest: [
            everybody,
            "the steps of its own weights, and the mean loss of every epoch",
            f"hosts' margins as ciphertexts under {coordinator}'s key: with its help it would have them, and hosts' "
            "columns",
        ],
        coordinator: [
            everybody,
            "every gradient, curvature, step and loss of all parties, hence all weights; with the columns' marginals, "
            "the means of columns in either class",
        ],
    }
    for host in hosts:
        learned[host] = [
            everybody,
            "the steps of its own weights: with batches of no more rows than it has columns, the residuals of rows and "
            "their labels",
        ]
    return learned
