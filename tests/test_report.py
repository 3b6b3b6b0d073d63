"""The facts of `uma report`: held against `uma estimate` and `uma compare` of the same."""

import json
from functools import cache
from typing import Any

import pytest

pytest.importorskip("typer")

from uma.catalog.listed import listed_models
from uma.cli import main
from uma.cli.report_parts import _chosen
from uma.machine.here import machine_of
from uma.plan.capacity.cards import plan_rows
from uma.plan.capacity.decision import Decision, Question, decision
from uma.plan.capacity.diff import changes
from uma.plan.capacity.facts import MachineReport
from uma.plan.capacity.report import Chosen, Named, Scope, machine_reports, plans_of
from uma.plan.compare import HostProfile, Price, Wanted, candidates
from uma.report.capacity.document import Parts, document
from uma.units import GIB, MIB

STUDIO, AIR, CARD = "mac-studio-m3-ultra-256", "macbook-air-m4-16", "rtx-4090"
MODEL = "llama-3.1-8b"
TESTED = (16, 4)  # widths, so that the tests stay quick


@cache
def chosen() -> tuple[Chosen, ...]:
    return (_chosen(MODEL),)


@cache
def report(machine: str) -> MachineReport:
    scope = Scope(tuple(listed_models("gemma-3")), chosen(), widths=TESTED)
    (found,) = machine_reports([Named(machine, machine_of(machine))], scope)
    return found


def said(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    main(["estimate", *map(str, words), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("machine", [STUDIO, AIR, CARD])
def test_a_cell_of_the_map_is_what_uma_estimate_says(
    machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [(row.model, cell) for row in report(machine).rows for cell in row.cells]
    assert len(cells) >= 8
    for model, cell in cells[::4]:
        for at in cell.at:
            told = said(
                capsys, model, "--machine", machine, "--bits", cell.bits, "-c", at.context_tokens
            )
            assert told["total_bytes"] == at.total_bytes
            assert (told["verdict"], told["headroom_bytes"]) == (at.verdict, at.headroom_bytes)
            assert told["model"]["format"] == cell.format


def test_verdicts_under_raised_limits_are_those_of_uma_estimate_with_that_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scope = Scope(tuple(listed_models("glm-4.5")), (), (8192,))
    machine = "mac-studio-m4-max-128"
    (found,) = machine_reports([Named(machine, machine_of(machine))], scope)
    seen: set[str] = set()
    changed = 0
    for row in found.rows:
        for cell in row.cells:
            at = cell.at[0]
            seen |= set(at.verdicts)
            if len(set(at.verdicts)) == 1:
                continue
            changed += 1
            for limit, verdict in zip(found.budget.limits[1:], at.verdicts[1:], strict=True):
                words = [row.model, "--machine", machine, "--bits", cell.bits, "-c", 8192]
                told = said(capsys, *words, "--gpu-limit", f"{limit.wired_limit_mb}MiB")
                assert told["verdict"] == verdict
                assert told["budget_bytes"] == limit.budget_bytes
    assert changed
    assert seen == {"fits", "tight", "exceeds"}


def test_a_raised_limit_leaves_the_reserve_and_what_fits_never_gets_less() -> None:
    found = report(STUDIO)
    limits = found.budget.limits
    assert limits[0].wired_limit_mb is None
    for limit in limits[1:]:
        assert limit.wired_limit_mb is not None
        assert limit.limit_bytes == limit.wired_limit_mb * MIB
        assert limit.left_bytes >= found.budget.reserve_bytes
        assert limit.command == f"sudo sysctl iogpu.wired_limit_mb={limit.wired_limit_mb}"
    for context in (8192, 32_768):
        models = [best.models for best in found.best if best.context_tokens == context]
        assert len(models) == len(limits)
        assert models == sorted(models)


def test_no_raised_limit_makes_a_verdict_worse() -> None:
    """Where macOS is not known the limit is a range, within which a value might lower it."""
    scope = Scope(tuple(listed_models("glm-4.5")), (), (8192,))
    machine = "mac-studio-m4-max-128"
    (found,) = machine_reports([Named(machine, machine_of(machine))], scope)
    assert found.budget.limits[0].limit_bytes > found.budget.limit_low_bytes
    worse = ("fits", "tight", "exceeds")
    cells = [at.verdicts for row in found.rows for cell in row.cells for at in cell.at]
    assert any(len(set(verdicts)) > 1 for verdicts in cells)
    for verdicts in cells:
        ranks = [worse.index(verdict) for verdict in verdicts]
        assert ranks == sorted(ranks, reverse=True)


def test_a_small_mac_has_no_limit_to_raise() -> None:
    assert len(report(AIR).budget.limits) == 1


@pytest.mark.parametrize("machine", [STUDIO, AIR])
def test_a_point_of_the_page_is_what_uma_estimate_says_term_by_term(
    machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for model in report(machine).models:
        for point in model.points[::23]:
            words = [model.model, "--machine", machine, "--bits", point.bits]
            words += ["-c", point.context_tokens, "--batch-size", point.batch_size]
            words += ["--kv-bits", point.kv_bits] if point.kv_bits < 16 else []
            told = said(capsys, *words)
            assert told["total_bytes"] == point.total_bytes
            assert (told["verdict"], told["binding_phase"]) == (point.verdict, point.phase)
            assert told["headroom_bytes"] == point.headroom_bytes
            held = [
                (term["name"], term["size_bytes"], term["basis"])
                for term in told["terms"]
                if term["phase"] in ("always", point.phase) and term["size_bytes"]
            ]
            assert held == [(t.name, t.size_bytes, t.basis) for t in point.terms]


def test_the_terms_of_every_point_sum_to_its_total() -> None:
    for machine in (STUDIO, CARD):
        points = [p for model in report(machine).models for p in model.points]
        assert len(points) > 80
        assert all(sum(t.size_bytes for t in p.terms) == p.total_bytes for p in points)


def test_the_largest_context_and_the_sequences_are_those_of_uma_estimate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for model in report(AIR).models:
        for one in [o for o in model.longest if o.bits == 4]:
            words = [model.model, "--machine", AIR, "--bits", one.bits, "-c", 8192]
            words += ["--kv-bits", one.kv_bits] if one.kv_bits < 16 else []
            assert said(capsys, *words)["max_context_tokens"] == one.max_context_tokens
    for model in report(STUDIO).models:
        for some in [o for o in model.sequences if o.bits == 4]:
            words = [model.model, "--machine", STUDIO, "--bits", 4, "-c", some.context_tokens]
            assert said(capsys, *words)["max_batch_size"] == some.max_batch_size
            assert some.max_batch_size is not None
            assert some.paged_sequences is not None
            assert some.max_batch_size < some.paged_sequences <= 2 * some.max_batch_size + 1


def test_a_speed_is_told_where_some_limit_lets_it_run_and_a_reason_elsewhere() -> None:
    ats = [at for row in report(AIR).rows for cell in row.cells for at in cell.at]
    assert {at.verdict for at in ats} >= {"fits", "exceeds"}
    for at in ats:
        runs = any(one != "exceeds" for one in at.verdicts)
        assert (at.decode.tps is not None) == runs
        assert runs or at.decode.reason == "it does not fit"
        if at.decode.tps is not None:
            assert at.decode.tps_low is not None
            assert at.decode.tps_high is not None
            assert at.decode.tps_low < at.decode.tps < at.decode.tps_high


@pytest.mark.parametrize("machine", [STUDIO, CARD])
def test_a_row_of_the_fine_tuning_map_is_what_uma_estimate_says(
    machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row for row in report(machine).training if row.reason is None]
    assert len(rows) >= 3
    for row in rows:
        told = said(capsys, row.model, "--machine", machine, *row.options.split())
        assert told["total_bytes"] == row.total_bytes, row
        assert told["verdict"] == row.verdict
        assert told["largest"]["max_seq_length"] == row.largest_seq_length
        assert told["largest"]["batch_size"] == row.largest_batch_size


def test_the_best_of_a_context_is_the_largest_model_that_fits_in_4_bits_or_more() -> None:
    listed = tuple(listed_models("gemma-3"))
    scope = Scope(listed, (), (32_768,), widths=(8, 4, 3))
    sizes = {model.name: model.parameters or 0 for model in listed}
    (found,) = machine_reports([Named("m", machine_of("mac-mini-m4-24"))], scope)
    (best,) = found.best
    fitting = [
        (sizes[row.model], cell.bits)
        for row in found.rows
        for cell in row.cells
        if cell.at[0].verdict == "fits"
    ]
    wide = [one for one in fitting if one[1] >= 4]
    assert best.model is not None
    assert (sizes[best.model], best.bits) == max(wide) < max(fitting)  # the largest needs 3 bits
    assert best.formats == len(wide)


def test_machines_of_one_kind_share_what_is_worked_out_and_do_not_mix_it_up() -> None:
    scope = Scope(tuple(listed_models("gemma-3-4b")), (), (8192,), TESTED)
    names = [AIR, CARD, STUDIO, "2xrtx-3090"]
    together = machine_reports([Named(name, machine_of(name)) for name in names], scope)
    for name, found in zip(names, together, strict=True):
        (alone,) = machine_reports([Named(name, machine_of(name))], scope)
        assert found == alone


def test_a_plan_is_the_row_of_uma_compare(capsys: pytest.CaptureFixture[str]) -> None:
    names = [STUDIO, "2xrtx-3090", CARD]
    found = candidates(names, HostProfile(), {})
    rows = plans_of(chosen(), found, 16_384, Wanted())
    assert [row.machine for row in rows] == names
    machines = [word for name in names for word in ("--machine", name)]
    main(["compare", MODEL, *machines, "--context", "16384", "--json"])
    told = {plan["machine"]: plan for plan in json.loads(capsys.readouterr().out)["plans"]}
    for row in rows:
        plan = told[row.machine]
        for name in ("technique", "engine", "format", "bits", "device_bytes", "verdict"):
            assert plan[name] == getattr(row, name)
        assert (plan["decode_tps"], plan["decode_tps_low"]) == (row.decode.tps, row.decode.tps_low)
        assert row.price_usd in (plan["price_usd"], plan["devices_price_usd"])


def test_the_power_of_cards_counts_each_of_them() -> None:
    rows = plan_rows(
        *chosen()[0], 8192, candidates([CARD, "2xrtx-3090"], HostProfile(), {}), Wanted()
    )
    assert [row.power_w for row in rows] == [450, 700]  # NVIDIA's board power: 450 W, 350 W


@cache
def decided(*prices: tuple[str, int]) -> Decision:
    names = [STUDIO, "mac-studio-m4-max-64", "2xrtx-3090"]
    own = {name: Price(usd, "user") for name, usd in prices}
    host = HostProfile(price=Price(900, "user") if prices else None)
    found = candidates(names, host, own)
    return decision(Question(*_chosen("llama-3.3-70b"), 8192, tuple(found), Wanted()))


def test_users_are_as_many_as_uma_compare_serves_with_the_speed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for row in decided().rows:
        assert row.users is not None
        for number, does in ((row.users, True), (row.users * 2, False)):
            words = ["compare", "llama-3.3-70b", "--machine", row.plan.machine, "--context", "8192"]
            main([*words, "--concurrency", str(number), "--json"])
            (plan,) = json.loads(capsys.readouterr().out)["plans"]
            runs = plan["verdict"] in ("fits", "tight")
            assert (runs and (plan["decode_tps"] or 0) >= 10) == does


def test_prices_of_the_user_decide_and_a_flip_names_the_price() -> None:
    prices = ((STUDIO, 7000), ("mac-studio-m4-max-64", 3000), ("rtx-3090", 700))
    found = decided(*prices)
    assert found.recommended == "2xrtx-3090"  # 2 x 700 and 900 for the host
    assert "cheapest" in found.why
    assert any("less than US$ 2,300" in flip for flip in found.flips)


def test_where_no_machine_does_the_work_nothing_is_recommended() -> None:
    found = candidates([AIR], HostProfile(), {})
    question = Question(*_chosen("llama-3.3-70b"), 8192, tuple(found), Wanted())
    assert decision(question).recommended is None


@cache
def parts(machine: str, budget: int | None = None) -> dict[str, Any]:
    listed = tuple(listed_models("gemma-3"))
    scope = Scope(listed, (), widths=TESTED, budget_bytes=budget)
    found = machine_reports([Named(machine, machine_of(machine))], scope)
    plans = plans_of(chosen(), candidates([machine], HostProfile(), {}), 8192, Wanted())
    return document(
        Parts(
            date="2026-11-30",
            contexts=scope.contexts,
            widths=TESTED,
            listed=listed,
            chosen=(MODEL,),
            machines=tuple(found),
            plans=plans,
            plans_context_tokens=8192,
        )
    )


def test_a_report_differs_from_itself_in_nothing() -> None:
    found = parts(AIR)
    assert changes(found, found)["texts"] == []
    assert changes(found, found)["rows"] == []


def test_a_smaller_budget_shows_as_verdicts_that_changed_and_as_the_budget() -> None:
    before, after = parts(AIR), parts(AIR, budget=4 * GIB)
    told = changes(before, after)
    assert f"{AIR}: the budget was 8.00 GiB, is 4.00 GiB" in told["texts"]
    rows = [row for row in told["rows"] if row["what"] == "verdict"]
    was = {
        (row["model"], cell["bits"], at["context_tokens"]): at["verdict"]
        for row in before["machines"][0]["rows"]
        for cell in row["cells"]
        for at in cell["at"]
    }
    now = {
        (row["model"], cell["bits"], at["context_tokens"]): at["verdict"]
        for row in after["machines"][0]["rows"]
        for cell in row["cells"]
        for at in cell["at"]
    }
    changed = {key for key in was if was[key] != now[key]}
    assert changed
    assert {(r["model"], r["bits"], r["context_tokens"]) for r in rows} == changed


def test_machines_that_came_and_went_are_told() -> None:
    texts = changes(parts(AIR), parts(STUDIO))["texts"]
    assert f"{STUDIO} is new in this report" in texts
    assert f"{AIR} is no longer in this report" in texts


def test_the_summary_names_the_budget_and_the_largest_model_that_fits() -> None:
    found = parts(AIR)
    first, second, third = found["summary"]
    machine = found["machines"][0]
    assert "8.00 GiB" in first
    for best in machine["best"]:
        assert f"{best['context_tokens']:,}" in second
        assert best["model"] in second
    assert "iogpu.wired_limit_mb" in third
