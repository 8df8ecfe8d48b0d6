"""FedXGB while users come and go over long jobs: what is left for sums, accuracy, reserves and loss curves.

Liu et al. 2020 lose 0 to 30 % of 300 users of 10 edge servers at every tenth round. Here others of each domain's users
are lost at every tenth round, or at every second, each at some message of that round's tree, and are away until others
are. Each part can be run alone, and writes its own file:

`--tolerance` (`fedxgb_tolerance.csv`): the choice of cohorts alone, without training or encryption: for domains of 6 to
100 users and jobs of 100 and 1,000 rounds, the share of a domain's users whose rows are in a tree's last sum, and the
share of trees to which the domain adds nothing; and likewise where users leave one after another and never come back.
About 5 minutes.

`--collusion` (`fedxgb_collusion.csv`): the choice of cohorts alone, too: in jobs of 100 trees, each begun without
others of 20 %, in what share of draws some users who tell the server their own vectors find another user's sums.

`--training` (`fedxgb_churn.csv`): the whole protocol, 3 domains of 15, 20 and 30 users, Adult's rows dealt among them
at random, 100 rounds, ten seeds; two hours. Bars: all rounds are finished, and accuracy is at most 0.015 below that
of the same grower on all rows.

`--reserves` (`fedxgb_reserves.csv`, and a figure of the test losses by round, as in the paper's Fig. 3(b)): 300 users
of 10 edge servers, of whom 20 of each domain's 30 take part in a tree and the others are reserves (`max_users`), 100
rounds on Adult, beside everybody taking part. Bar: at most 0.01 less accuracy than pooled.

`--noise` (`fedxgb_noise.csv`): AUC with `epsilon_total`, 60 users of 3 edge servers. 30 % of them are lost in every
round, each at some message. Beside them stands the same crowd without noise and loss. The tables are made-up customers
of a telephone company (7,000 rows, 19 columns) and Default of Credit Card Clients. The last lines protect whole users.
Bar: at epsilon 4 a row, at most 0.03 less. About 15 minutes.

`--bytes` (`fedxgb_bytes.csv`): Fig. 4 of the paper. One tree of a hidden model on 50,000 rows of 100 columns in all,
by 100 to 500 users and by 5 to 20 edge servers (on both kinds of shares), with nobody and with 30 % of users lost as
the tree grows: what each role sends and receives, its own processor seconds, and the powers of the number of users, or
of edge servers, with which they have grown since the first of a line. About 40 minutes.

`--short` is for a machine that does other things, too: `--training` with 30 % lost, one seed and 30 rounds;
`--reserves` with 36 users of 3 edge servers, 9 of 12 in a tree, and 30 rounds; `--bytes` on 12,000 rows by 30, 60 and
120 users of 3 edge servers and by 3, 6 and 12 edge servers of 120 users. The files say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split

import figures
from data import arguments, default_of_credit_card_clients, replace, report, verdict
from federboost_horizontal import one_core, own_times
from fedxgb import (
    AT_RANDOM,
    PATIENT,
    ROLES,
    TrainingOutcome,
    curve,
    deal,
    fedxgb,
    few_switches,
    log_losses,
    made_up,
    reference,
    role_of,
    sent,
    setting_of,
    train,
)  # fmt: skip
from treaty import FedXGB, GBDTClassifier
from treaty.runs.warm_up import compile_kernels
from treaty.systems.fedxgb import domain
from treaty.systems.fedxgb.cohorts import Cohorts, Rules, UserStanding, select

LOST = (0.1, 0.2, 0.3)
PERIODS = (10, 2)
SIZES = (15, 20, 30)
OF_LOSS = ("own s of each user", "own s of each edge", "MB of each user", "MB of each edge")
PARTS = ("tolerance", "collusion", "training", "reserves", "noise", "bytes")
NEAR, NEAR_WITH_RESERVES, NEAR_UNDER_NOISE = 0.015, 0.01, 0.03


# ---------------------------------------------------------------- cohorts alone


def cohorts_of(users: int, rounds: int, lost: float, period: int, gone: int, seed: int) -> Iterator[int]:
    """Yield how many of a domain's users are in the last sum of each tree.

    A share of them is lost as every `period`-th tree grows and away until others are; one leaves for good every `gone`
    trees (0: nobody).
    """
    rng = np.random.default_rng(seed)
    names = [f"u{k}" for k in range(users)]
    standings = {name: UserStanding() for name in names}
    cohorts, away, running = Cohorts(Rules(), rng), set[str](), names
    cohorts.open(names)
    left = list(names)
    for tree in range(1, rounds + 1):
        leaving = {left.pop()} if gone and tree % gone == 0 and len(left) > 3 else set[str]()
        event = bool(lost) and tree % period == 0
        lost_now = set(rng.choice(left, int(lost * len(left)), replace=False).tolist()) if event else away
        there = [name for name in [*left, *leaving] if event or name not in away]
        ordered = select({name: standings[name] for name in there}, running, rng)
        running = cohorts.begin(ordered, sorted(set(left) - set(there))) or []
        came = [name for name in running if name not in lost_now | leaving]
        running = (cohorts.keep(came) if came else None) or []
        if running:
            cohorts.open(running)
        away = lost_now
        yield len(running)


def tolerance(quick: bool) -> list[dict]:
    """Play cohorts by size of the domain, length of the job and kind of loss."""
    sizes = (6, 15) if quick else (6, 9, 12, 15, 20, 30, 50, 100)
    kinds = [(lost, period, 0) for lost in LOST for period in PERIODS] + [(0.0, 10, 10)]
    rows = []
    for users in sizes:
        for rounds, seeds in ((100, 1),) if quick else ((100, 3), (1_000, 1)):
            for lost, period, gone in kinds:
                if lost and int(lost * users) == 0:
                    continue
                played = [list(cohorts_of(users, rounds, lost, period, gone, seed)) for seed in range(seeds)]
                left = users if not gone else mean(max(3, users - k // gone) for k in range(1, rounds + 1))
                rows.append({
                    "users of the domain": users,
                    "rounds": rounds,
                    "lost": lost or "",
                    "at every round that is a multiple of": period if lost else "",
                    "rounds between users who leave for good": gone or "",
                    "share of users there": f"{1 - int(lost * users) / users if lost else left / users:.2f}",
                    "share of users in sums": f"{np.mean(played) / users:.2f}",
                    "fewest users in a tree's last sum": min(map(min, played)),
                    "trees without the domain": f"{np.mean(np.array(played) == 0):.4f}",
                })  # fmt: skip
                print(*rows[-1].values(), flush=True)
    return rows


def isolated(opened: Sequence[frozenset[str]], names: Sequence[str], colluding: set[str]) -> bool:
    """Tell whether a combination of these cohorts is of one user and those who collude."""
    others = [name for name in names if name not in colluding]
    rows = np.array([[name in cohort for name in others] for cohort in set(opened)], np.float64)
    _, sizes, directions = np.linalg.svd(rows, full_matrices=False)
    span = directions[sizes > 1e-7 * sizes[0]]
    return bool(np.any(1.0 - np.sum(span**2, axis=0) <= 1e-7))


def opened_cohorts(users: int, group_size: int | None, seed: int) -> list[frozenset[str]]:
    """Return a domain's cohorts in a job of 100 trees, each begun without others of 20 %."""
    rng, names = np.random.default_rng(seed), [f"u{k}" for k in range(users)]
    rules = Rules(least_change=group_size or 3, whole=group_size is not None)
    cohorts, opened, running = Cohorts(rules, rng), [frozenset(names)], names
    cohorts.open(names)
    for _ in range(100):
        away = set(rng.choice(names, int(0.2 * users), replace=False).tolist())
        there = {name: UserStanding() for name in names if name not in away}
        running = cohorts.begin(select(there, running, rng), sorted(away)) or []
        if running:
            cohorts.open(running)
            opened.append(frozenset(running))
    return opened


def collusion(quick: bool) -> list[dict]:
    """Draw users who collude with the server, by size of the domain and groups."""
    rows = []
    for users in (9, 15, 30):
        for group_size in (None, 5):
            played = [opened_cohorts(users, group_size, seed) for seed in range(2 if quick else 20)]
            for colluding in (1, 2, 3, 4, users // 3):
                rng, names = np.random.default_rng(colluding), [f"u{k}" for k in range(users)]
                found = [
                    isolated(opened, names, set(rng.choice(names, colluding, replace=False).tolist()))
                    for opened in played
                    for _ in range(50)
                ]
                rows.append({
                    "users of the domain": users,
                    "group_size": group_size or "",
                    "who collude": colluding,
                    "share of draws that find another user": f"{np.mean(found):.3f}",
                })  # fmt: skip
                print(*rows[-1].values(), flush=True)
    return rows


# ---------------------------------------------------------------- whole trainings


def training(users_of_a_domain: Sequence[int], quick: bool, short: bool) -> None:
    """Train 3 domains of Adult's rows while users come and go; each setting's row is kept as soon as it is known."""
    setting, rounds, seeds = setting_of("adult"), 11 if quick else 30 if short else 100, 1 if quick or short else 10
    sizes, periods = ((9,), (2,)) if quick else (users_of_a_domain, PERIODS)
    kept, tested = setting.split[0]
    kept = kept[:3_000] if quick else kept
    x, y = setting.data.x[kept].astype(np.float32), setting.data.y[kept]
    test = setting.data.x[tested].astype(np.float32), setting.data.y[tested]
    plain = curve(reference(x, y, fedxgb(3, n_estimators=rounds, min_child_samples=20)), *test)[-1]
    rows = []
    for users in sizes:
        for lost in LOST[-1:] if short else LOST:
            for period in periods:
                accuracies, finished, fewest = [], [], []
                for seed in range(seeds):
                    options = fedxgb(
                        3, n_estimators=rounds, min_child_samples=20, dropout=lost, dropout_period=period,
                        random_state=seed,
                    )  # fmt: skip
                    outcome = train(x, y, deal(y, 3 * users, AT_RANDOM, seed), options)
                    accuracies.append(curve(outcome.part, *test)[-1])
                    finished.append(outcome.part.forest.rounds if outcome.part.forest else 0)
                    fewest.append(min(outcome.users))
                rows.append({
                    "users of each of 3 domains": users,
                    "lost": lost,
                    "at every round that is a multiple of": period,
                    "seeds": seeds,
                    f"fewest rounds finished of {rounds}": min(finished),
                    "fewest users in a sum": min(fewest),
                    "accuracy": f"{mean(accuracies):.4f}",
                    "lowest": f"{min(accuracies):.4f}",
                    "pooled": f"{plain:.4f}",
                    f"lowest is less by <= {NEAR}": verdict(plain - min(accuracies), NEAR),
                })  # fmt: skip
                print(rows[-1], flush=True)
                if not quick:
                    replace("fedxgb_churn", rows[-1:], *list(rows[-1])[:3])


def reserves(quick: bool, short: bool) -> list[dict]:
    """Train the paper's crowd over 100 rounds, with and without reserves; draw the losses on the test rows."""
    setting = setting_of("adult")
    users, edges, most, rounds = (36, 3, 6, 11) if quick else (36, 3, 9, 30) if short else (300, 10, 20, 100)
    kept, tested = setting.split[0]
    kept = kept[:3_000] if quick else kept
    x, y = setting.data.x[kept].astype(np.float32), setting.data.y[kept]
    test = setting.data.x[tested].astype(np.float32), setting.data.y[tested]
    plain = curve(reference(x, y, fedxgb(edges, n_estimators=rounds)), *test)[-1]
    rows, losses = [], {}
    for lost in (0.0, *LOST):
        for chosen in (None, most):
            options = fedxgb(edges, n_estimators=rounds, dropout=lost or None, max_users=chosen)
            outcome = train(x, y, deal(y, users, AT_RANDOM, 0), options)
            ours = curve(outcome.part, *test)[-1]
            losses[lost, chosen] = log_losses(outcome.part, *test)
            rows.append({
                "users": users,
                "edges": edges,
                "lost at every tenth round": lost,
                "users of a domain in a tree, at most": chosen or "all",
                "rounds": outcome.part.forest.rounds if outcome.part.forest else 0,
                "users in a sum": f"{mean(outcome.users):.1f}",
                "accuracy": f"{ours:.4f}",
                "pooled": f"{plain:.4f}",
                "log loss": f"{losses[lost, chosen][-1]:.4f}",
                f"less by <= {NEAR_WITH_RESERVES}": verdict(plain - ours, NEAR_WITH_RESERVES),
            })  # fmt: skip
            print(rows[-1], flush=True)
    draw_losses(losses, most, quick)
    return rows


def draw_losses(losses: dict[tuple[float, int | None], list[float]], most: int, quick: bool) -> None:
    figure, panels = figures.panels(["everybody takes part", f"{most} of each domain, the others are reserves"])
    for panel, chosen in zip(panels, (None, most), strict=True):
        for (lost, of), values in losses.items():
            if of == chosen:
                panel.plot(range(1, len(values) + 1), values, label=f"{lost:.0%} lost")
        panel.set(xlabel="rounds", ylabel="log loss on test rows", yscale="log")
        panel.legend(fontsize=8)
    figures.save(figure, "fedxgb_reserves", quick=quick)


def bytes_of_users(quick: bool, short: bool) -> list[dict]:
    """Train one tree on the same rows by more and more users, and edge servers; return what each role spends."""
    n_rows, columns = (1_500, 10) if quick else (12_000, 100) if short else (50_000, 100)
    x, y = made_up(n_rows, columns)
    of_users = [(36, 3), (72, 3)] if quick else [(n, 3) for n in (30, 60, 120)] if short else []
    of_users = of_users or [(n, 10) for n in (100, 200, 300, 500)]
    of_edges = [(120, n) for n in (3, 6, 12)] if short else [(300, n) for n in (5, 10, 15, 20)]
    lines = {"users": (of_users, "shamir")}
    if not quick:
        lines |= {"edge servers": (of_edges, "shamir"), "edge servers, additive shares": (of_edges, "additive")}
    rows, played = [], {}
    for by, (sizes, comparison) in lines.items():
        for lost in (0.0, LOST[-1]):
            first: tuple[int, dict[str, float]] | None = None
            for users, edges in sizes:
                setting = users, edges, lost, comparison
                made = played[setting] = played.get(setting) or spent_by_role(x, y, *setting)
                size, spent = users if by == "users" else edges, made["spent"]
                first, whole = first or (size, spent), played[users, edges, 0.0, comparison]["spent"]
                ratio = math.log(size / first[0])
                powers = [
                    f"{math.log(now / then) / ratio:.2f}" if ratio else ""
                    for now, then in zip(spent.values(), first[1].values(), strict=True)
                ]
                rows.append({
                    "by": by,
                    "users": users,
                    "edges": edges,
                    "rows": n_rows,
                    "lost as the tree grows": lost,
                    "users in its last sum": made["in sum"],
                    **{name: f"{value:.4f}" for name, value in spent.items()},
                    **{f"power in {name}": power for name, power in zip(spent, powers, strict=True)},
                    **{f"{name}, times with nobody lost": f"{spent[name] / whole[name]:.2f}" for name in OF_LOSS},
                })  # fmt: skip
                print(*rows[-1].values(), flush=True)
    return rows


def telco_like(seed: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    """Return made-up customers of a telephone company, and which of them leave: 7,000 rows, about 27 % leave."""
    rng, n_rows = np.random.default_rng(seed), 7_000
    contract = rng.choice(3, n_rows, p=[0.55, 0.21, 0.24])
    months = np.ceil(72 * rng.beta(0.6 + 0.8 * contract, 1.1)).astype(np.float64)
    internet = rng.choice(3, n_rows, p=[0.34, 0.44, 0.22])
    charge = 20 + 25 * (internet == 0) + 55 * (internet == 1) + rng.gamma(4, 3, n_rows)
    paperless, cheque, senior = (rng.random(n_rows) < share for share in (0.6, 0.34, 0.16))
    services = {f"service {k}": np.where(internet == 2, 2, rng.random(n_rows) < 0.4).astype(int) for k in range(9)}
    odds = (
        -0.6 - 1.3 * contract - 0.035 * months + 1.0 * (internet == 1) + 0.4 * paperless + 0.5 * cheque + 0.3 * senior
    )
    odds = odds + 0.012 * charge - 0.35 * sum(of == 1 for of in list(services.values())[:4])
    table = pd.DataFrame({
        "contract": contract, "months": months, "internet": internet, "charge": charge, "paid": charge * months,
        "paperless": paperless, "cheque": cheque, "senior": senior, "partner": rng.random(n_rows) < 0.48,
        "dependents": rng.random(n_rows) < 0.3, **services,
    })  # fmt: skip
    named = ["contract", "internet", *services]
    leaves = rng.random(n_rows) < 1 / (1 + np.exp(-odds))
    return table.astype(dict.fromkeys(named, "category")), leaves.astype(int)


def noise(quick: bool) -> list[dict]:
    """Train crowds that lose users with and without noise; return AUC on a third of the rows."""
    users, seeds = (18, 1) if quick else (60, 3)
    credit = default_of_credit_card_clients()
    tables = {
        "telephone customers, made up": telco_like(),
        credit.title: (pd.DataFrame(credit.x, columns=credit.names), credit.y),
    }
    kinds: list[dict[str, Any]] = [
        {},
        {"epsilon_total": 4.0},
        {"epsilon_total": 1.0},
        {"epsilon_total": 8.0, "user_rows": 5},
    ]
    rows = []
    for title, (table, y) in tables.items():
        plain = 0.0
        for kind in kinds:
            lost = {"dropout": 0.3, "dropout_period": 1} if kind else {}
            found = []
            for seed in range(seeds):
                train_x, test_x, train_y, test_y = train_test_split(
                    table, y, test_size=1 / 3, random_state=seed, stratify=y
                )
                who = np.random.default_rng(seed).integers(users, size=len(train_y))
                shards = {f"user{k}": (train_x[who == k], train_y[who == k]) for k in range(users)}
                model = GBDTClassifier(FedXGB(edges=3, expose="model", **kind, **lost), random_state=seed).fit(shards)
                found.append(float(roc_auc_score(test_y, model.predict_proba(test_x)[:, 1])))
            plain = plain if kind else mean(found)
            rows.append({
                "data": title, "users": users, "lost at every round": lost.get("dropout", ""),
                "epsilon": kind.get("epsilon_total", ""), "user_rows": kind.get("user_rows", ""), "seeds": seeds,
                "AUC": f"{mean(found):.4f}", "lowest": f"{min(found):.4f}",
                "less than without noise": f"{plain - mean(found):.4f}",
                f"at epsilon 4 a row less by <= {NEAR_UNDER_NOISE}": verdict(plain - mean(found), NEAR_UNDER_NOISE)
                if kind == {"epsilon_total": 4.0}
                else "",
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def spent_by_role(x: np.ndarray, y: np.ndarray, users: int, edges: int, lost: float, comparison: str) -> dict[str, Any]:
    """Train one tree of a hidden model; return mean MB and own seconds of each role, and the users in the last sum."""
    options = fedxgb(
        edges, n_estimators=1, dropout=lost or None, dropout_period=1 if lost else None, expose="nothing",
        comparison=comparison,
    )  # fmt: skip
    trained: list[TrainingOutcome] = []
    # who drops out says so: on a busy machine nobody else is to be lost
    with patch.object(domain, "PATIENCE", PATIENT), one_core(), few_switches():
        own = own_times(lambda: trained.append(train(x, y, deal(y, users, AT_RANDOM, 0), options)))
    of_role = {role: [name for name in own if role_of(name) == role] for role in ROLES}
    spent = {
        f"MB of each {role}": mean(
            sum(sent(trained[0].played, name, way) for way in ("sent", "received")) for name in names
        )
        for role, names in of_role.items()
    }
    spent |= {f"own s of each {role}": mean(own[name] for name in names) for role, names in of_role.items()}
    return {"spent": spent, "in sum": trained[0].users[-1]}


def main(arguments_given: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true", help="this part alone")
    parser.add_argument("--users", type=int, nargs="+", default=SIZES, help="of each domain, in `--training`")
    parser.add_argument("--short", action="store_true", help="fewer seeds, rounds and users, and results are written")
    options = parser.parse_args(arguments_given)
    every = not any(vars(options)[part] for part in PARTS)
    if every or options.tolerance:
        report("fedxgb_tolerance", tolerance(options.quick), quick=options.quick)
    if every or options.collusion:
        report("fedxgb_collusion", collusion(options.quick), quick=options.quick)
    compile_kernels()
    if every or options.training:
        training(options.users, options.quick, options.short)
    if every or options.reserves:
        report("fedxgb_reserves", reserves(options.quick, options.short), quick=options.quick)
    if every or options.noise:
        report("fedxgb_noise", noise(options.quick), quick=options.quick)
    if every or options.bytes:
        report("fedxgb_bytes", bytes_of_users(options.quick, options.short), quick=options.quick)


if __name__ == "__main__":
    main()
