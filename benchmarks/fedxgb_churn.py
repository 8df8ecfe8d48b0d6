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

`--bytes` (`fedxgb_bytes.csv`): one tree on 50,000 rows of 100 columns in all, by 100 to 500 users and by 5 to 20 edge
servers, 0 to 30 % of users lost as the tree grows: what each role sends and receives, and its own processor seconds
(Fig. 4 of the paper). With it the power of the number of users with which a user's bytes grow. About 20 minutes.

`--short` is for a machine that does other things, too: `--training` with 30 % lost, one seed and 30 rounds;
`--reserves` with 36 users of 3 edge servers, 9 of 12 in a tree, and 30 rounds; `--bytes` with 100 and 300 users. The
files say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import mean

import numpy as np

import figures
from data import arguments, replace, report, verdict
from federboost_horizontal import own_times
from fedxgb import (
    AT_RANDOM,
    ROLES,
    TrainingOutcome,
    curve,
    deal,
    fedxgb,
    log_losses,
    made_up,
    reference,
    role_of,
    sent,
    setting_of,
    train,
)  # fmt: skip
from treaty.runs.warm_up import compile_kernels
from treaty.systems.fedxgb.cohorts import Cohorts, Rules, UserStanding, select

LOST = (0.1, 0.2, 0.3)
PERIODS = (10, 2)
SIZES = (15, 20, 30)
PARTS = ("tolerance", "collusion", "training", "reserves", "bytes")
NEAR, NEAR_WITH_RESERVES = 0.015, 0.01


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
        ordered = select({name: standings[name] for name in there}, running, Rules(), rng)
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
        running = cohorts.begin(select(there, running, rules, rng), sorted(away)) or []
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
    n_rows, columns = (1_500, 10) if quick else (50_000, 100)
    x, y = made_up(n_rows, columns)
    sizes = [(36, 3), (72, 3)] if quick else [(n, 10) for n in ((100, 300) if short else (100, 200, 300, 500))]
    sizes += [] if quick or short else [(300, edges) for edges in (5, 15, 20)]
    rows, of_users = [], {}
    for users, edges in sizes:
        for lost in (0.0, LOST[-1]) if quick or short else (0.0, *LOST):
            options = fedxgb(
                edges, n_estimators=1, dropout=lost or None, dropout_period=1 if lost else None, expose="model"
            )
            trained: list[TrainingOutcome] = []
            spent = own_times(
                lambda o=options, n=users, to=trained: to.append(train(x, y, deal(y, n, AT_RANDOM, 0), o))
            )
            traffic = {
                role: [
                    sum(sent(trained[0].played, name, way) for way in ("sent", "received"))
                    for name in spent
                    if role_of(name) == role
                ]
                for role in ROLES
            }
            of_users[users, edges, lost] = mean(traffic["user"])
            fewer = next((n for n, of, share in of_users if (of, share) == (edges, lost) and n < users), None)
            power = (
                math.nan
                if fewer is None
                else math.log(of_users[users, edges, lost] / of_users[fewer, edges, lost]) / math.log(users / fewer)
            )
            rows.append({
                "users": users,
                "edges": edges,
                "rows": n_rows,
                "rows of a user": n_rows // users,
                "lost as the tree grows": lost,
                "users in its last sum": trained[0].users[-1],
                **{f"MB of each {role}": f"{mean(of_role):.3f}" for role, of_role in traffic.items()},
                "MB of all users": f"{sum(traffic['user']):.1f}",
                "power of users in a user's MB, since the fewest": "" if fewer is None else f"{power:.2f}",
                **{
                    f"own s of each {role}": f"{mean(spent[name] for name in spent if role_of(name) == role):.4f}"
                    for role in ROLES
                },
            })  # fmt: skip
            print(*rows[-1].values(), flush=True)
    return rows


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
    if every or options.bytes:
        report("fedxgb_bytes", bytes_of_users(options.quick, options.short), quick=options.quick)


if __name__ == "__main__":
    main()
