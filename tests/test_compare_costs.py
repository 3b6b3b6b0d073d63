"""Prices, rent, electricity, and what they come to: `uma compare`'s total cost and break-even."""

import pytest
from test_compare import machine, subject

from uma.errors import UsageError
from uma.plan.compare import HostProfile, Price, Wanted, candidates, catalog_candidates, compare
from uma.plan.compare.candidates import Candidate, with_rents
from uma.plan.compare.costs import (
    NEVER,
    NO_RENT,
    NO_USE,
    Use,
    cheapest_rented,
    cost_of,
    tokens_per_joule,
    user_rents,
)
from uma.plan.compare.prices import user_prices
from uma.plan.compare.search import best_plan
from uma.units import GB

USE = Use(hours_per_day=8, years=3, usd_per_kwh=0.30)
HOURS = 8 * 365 * 3
MAC = "mac-studio-m5-ultra-96"  # 5,499 US$, 385 W


def rented(name: str, usd: float) -> Candidate:
    (one,) = with_rents([], {name: usd}, HostProfile(), {})
    return one


def test_owning_costs_the_price_and_electricity_at_full_power() -> None:
    cost = cost_of(machine(MAC), USE, None)
    assert cost.energy_usd == pytest.approx(HOURS * 0.385 * 0.30)
    assert cost.owned_usd == pytest.approx(5499 + HOURS * 0.385 * 0.30)
    assert (cost.break_even_h, cost.break_even_reason) == (None, NO_RENT)


def test_owning_pays_from_the_hour_on_at_which_rent_has_cost_as_much() -> None:
    cost = cost_of(machine(MAC), USE, rented("h100", 2.49))
    assert cost.break_even_h is not None
    hours = cost.break_even_h
    assert hours * 2.49 == pytest.approx(5499 + hours * 0.385 * 0.30)
    assert cost.rented == "h100"


def test_where_electricity_alone_costs_more_than_rent_owning_never_pays() -> None:
    cost = cost_of(machine(MAC), Use(8, 3, 10), rented("h100", 2.49))
    assert (cost.break_even_h, cost.break_even_reason) == (None, NEVER)


def test_a_machine_that_is_rented_and_bought_is_compared_with_its_own_rent() -> None:
    host = HostProfile(price=Price(5000, "user"), power_w=300)
    (h100,) = with_rents(candidates(["h100"], host, {}), {"h100": 3.0}, host, {})
    cost = cost_of(h100, USE, rented("h200", 1.0))
    assert h100.power_w == 700 + 300
    assert cost.rented == "h100"
    assert cost.rented_usd == pytest.approx(3 * HOURS)
    assert cost.break_even_h == pytest.approx(35_000 / (3 - 0.3))


@pytest.mark.parametrize(
    ("name", "use", "reason"),
    [
        (MAC, Use(), NO_USE),
        (MAC, Use(8, 3), NO_USE),
        ("rtx-4090", USE, "the machine around the cards has a price too: --host-price USD"),
        ("mac-studio-m2-max-64", USE, "no price of it is known: --price NAME=USD"),
        (
            "macbook-air-m5-16",
            USE,
            "its power is not in the catalog; --kwh 0 leaves electricity out",
        ),
    ],
)
def test_what_is_not_known_is_null_with_the_reason(name: str, use: Use, reason: str) -> None:
    cost = cost_of(machine(name), use, None)
    assert (cost.owned_usd, cost.reason) == (None, reason)


def test_without_electricity_its_power_need_not_be_known() -> None:
    cost = cost_of(machine("macbook-air-m5-16"), Use(8, 3, 0), None)
    assert cost.owned_usd == 1099
    host = HostProfile(price=Price(900, "user"))
    (cards,) = candidates(["2xrtx-3090"], host, {"rtx-3090": Price(700, "user")})
    assert cost_of(cards, Use(8, 3, 0), None).owned_usd == 2300


def test_cards_take_their_own_power_and_that_of_their_host() -> None:
    (bare,) = candidates(["2xrtx-3090"], HostProfile(), {})
    assert (bare.power_w, bare.power_reason) == (
        None,
        "the machine around the cards takes power too: --host-power W",
    )
    (whole,) = candidates(["2xrtx-3090"], HostProfile(power_w=150), {})
    assert whole.power_w == 2 * 350 + 150


def test_tokens_per_joule_are_those_at_full_power() -> None:
    assert tokens_per_joule(machine(MAC), 77.0) == (77 / 385, None)
    assert tokens_per_joule(machine("macbook-air-m5-16"), 77.0)[0] is None
    assert tokens_per_joule(machine(MAC), None) == (None, "its speed is not known")


def test_the_cheapest_is_that_of_the_least_cost_over_its_use() -> None:
    found = with_rents(candidates([MAC], HostProfile(), {}), {"h100": 2.49}, HostProfile(), {})
    for years, name in ((0.5, "h100"), (3, MAC)):
        wanted = Wanted(launch_prices=True, use=Use(8, years, 0.30))
        cheapest = compare(subject("llama-3-70b"), found, wanted).cheapest
        assert cheapest is not None
        assert cheapest.candidate.name == name
    assert 2.49 * 8 * 365 * 0.5 < 5499


def test_a_launch_price_is_not_the_cheapest_over_the_years_either() -> None:
    one = candidates([MAC], HostProfile(), {})
    assert compare(subject("llama-3-70b"), one, Wanted(use=USE)).cheapest is None
    own = candidates([MAC], HostProfile(), {MAC: Price(5000, "user")})
    assert compare(subject("llama-3-70b"), own, Wanted(use=USE)).cheapest is not None


def test_only_what_does_the_work_is_rented_instead() -> None:
    rents = {"rtx-4060-8gb": 0.1, "h100": 2.49}
    found = with_rents(candidates([MAC], HostProfile(), {}), rents, HostProfile(), {})
    best = compare(subject("llama-3-70b"), found, Wanted())
    assert best.rented is not None
    assert best.rented.name == "h100"
    assert cheapest_rented(candidates([MAC], HostProfile(), {})) is None


def test_a_rent_names_a_machine_that_is_there_or_adds_it() -> None:
    there = candidates(["H100 80GB"], HostProfile(), {})
    found = with_rents(there, {"h100": 2.0}, HostProfile(), {})
    assert [(one.name, one.rent_usd_per_h) for one in found] == [("H100 80GB", 2.0)]
    two = with_rents(there, {"2xh100": 4.0}, HostProfile(), {})
    assert [(one.name, one.rent_usd_per_h) for one in two] == [("H100 80GB", None), ("2xh100", 4.0)]


@pytest.mark.parametrize("text", ["h100", "h100=", "=2", "h100=-1", "h100=2/day", "h100=nan"])
def test_a_rent_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="NAME=USD/h"):
        user_rents([text])


def test_a_slower_slot_slows_what_crosses_it() -> None:
    (fast,) = candidates(["rtx-4090"], HostProfile(), {})
    (slow,) = candidates(["rtx-4090"], HostProfile(link_bytes_per_s=round(15.8 * GB)), {})
    (faster,) = candidates(["rtx-4090"], HostProfile(link_bytes_per_s=63 * GB), {})
    assert fast.machine.link_bytes_per_s == faster.machine.link_bytes_per_s == 31.5 * GB
    assert slow.machine.link_bytes_per_s == 15.8 * GB
    wanted = Wanted(min_tps=0.1, engine="transformers", min_bits=16)
    host = HostProfile(192 * 2**30, link_bytes_per_s=round(15.8 * GB))
    (streamed,) = candidates(["rtx-4090"], host, {})
    plan = best_plan(subject("llama-3-70b"), streamed, wanted).plan
    assert plan is not None
    assert plan.decode_tps is not None
    assert plan.decode_tps < 15.8 * GB / plan.host_bytes


def test_the_rent_of_two_macs_is_not_that_of_one() -> None:
    name = "mac-studio-m3-ultra-512"
    alone = candidates([name], HostProfile(), {})
    found = with_rents(alone, {f"2x{name}": 3.0}, HostProfile(), {})
    assert [(one.name, one.rent_usd_per_h) for one in found] == [(name, None), (f"2x{name}", 3.0)]


def test_a_price_of_several_is_that_of_all_of_them() -> None:
    own = {"2xrtx-3090": Price(1500, "user")}
    one, two = candidates(["rtx-3090", "2xrtx-3090"], HostProfile(), own)
    assert one.parts_price is not None
    assert one.parts_price.kind == "launch"
    assert two.parts_price == Price(1500, "user")
    name = "2xmac-studio-m3-ultra-512"
    (macs,) = candidates([name], HostProfile(), {name: Price(18_000, "user")})
    assert macs.price == Price(18_000, "user")


@pytest.mark.parametrize(
    "texts", [["a=1500,3"], ["a=1", "a=2"], ["a=1e9"], ["a=" + "9" * 5000], ["a=nan"]]
)
def test_a_price_that_is_none_is_refused(texts: list[str]) -> None:
    with pytest.raises(UsageError, match="--price"):
        user_prices(texts)


def test_prices_have_thousands_and_cents_as_rents_do() -> None:
    assert user_prices(["a=1,500", "b=1500.50"])["a"].usd == 1500
    assert user_rents(["a=1.50/h"]) == {"a": 1.5}
    with pytest.raises(UsageError, match="at most"):
        user_rents(["a=" + "9" * 400])
    twice = {"h100": Price(1, "user"), "h100 80gb": Price(2, "user")}
    with pytest.raises(UsageError, match="twice"):
        candidates(["h100"], HostProfile(), twice)


def test_one_machine_is_compared_once_however_it_is_written() -> None:
    names = ["RTX-3090", "rtx-3090", "1xrtx-3090", "RTX 3090*", "2xrtx-3090"]
    found = [one.machine.name for one in candidates(names, HostProfile(), {})]
    assert len(set(found)) == len(found)
    assert {"GeForce RTX 3090", "GeForce RTX 3090 Ti"} <= set(found)


def test_five_of_each_are_five_cards_and_no_macs() -> None:
    found = candidates(["5x*"], HostProfile(), {})
    assert found
    assert all(len(one.machine.devices) == 5 for one in found)


def test_a_machine_of_the_same_price_that_is_better_in_the_same_width_is_not_beaten() -> None:
    """Of two at 3,000 US$ the M5 Max runs more bits, with less to spare; it is the better one."""
    own = {name: Price(3000, "user") for name in ("mac-studio-m4-max-64", "mac-studio-m5-max-64")}
    both = candidates(list(own), HostProfile(), own)
    found = compare(subject("gemma-3-27b"), both, Wanted(min_tps=16))
    assert [row.plan is not None and row.plan.bits for row in found.rows] == [8, 6]
    assert [row.candidate.name for row in found.front] == ["mac-studio-m5-max-64"]
    assert found.cheapest is not None
    assert found.cheapest.candidate.name == "mac-studio-m5-max-64"


def test_a_tight_plan_is_not_the_cheapest_where_one_fits_and_is_told() -> None:
    names = {"mac-studio-m4-max-48": 1000, "mac-studio-m3-ultra-96": 3000}
    own = {name: Price(usd, "user") for name, usd in names.items()}
    found = compare(subject("llama-3-70b"), candidates(own, HostProfile(), own), Wanted(min_tps=1))
    assert [row.plan is not None and row.plan.verdict for row in found.rows] == ["fits", "tight"]
    assert found.cheapest is not None
    assert found.cheapest.candidate.name == "mac-studio-m3-ultra-96"
    assert found.left_out == (
        ("mac-studio-m4-max-48", "would be cheaper, US$ 1,000, but is tight"),
    )


def test_cards_with_a_price_and_no_hosts_are_said_to_be_left_out() -> None:
    own = {"rtx-4090": Price(500, "user"), MAC: Price(5000, "user")}
    found = compare(subject("llama-3-8b"), candidates(own, HostProfile(), own), Wanted())
    ((name, why),) = found.left_out
    assert name == "rtx-4090"
    assert "--host-price" in why


def test_where_any_speed_will_do_one_that_is_not_known_does() -> None:
    host, own = HostProfile(price=Price(1, "user")), {"rtx-4090-laptop": Price(2000, "user")}
    cards = candidates(own, host, own)
    any_speed = compare(subject("llama-3-8b"), cards, Wanted(min_tps=0))
    assert any_speed.rows[0].decode_tps is None
    assert any_speed.cheapest is any_speed.rows[0]
    fast = compare(subject("llama-3-8b"), cards, Wanted(min_tps=10))
    assert fast.cheapest is None
    assert "the speed is not known" in (fast.cheapest_reason or "")


def test_the_cheapest_has_a_row_and_cards_of_unknown_speed_come_last() -> None:
    sold = catalog_candidates(HostProfile(), {}, sold=True)
    found = compare(subject("llama-3-8b"), sold, Wanted(), shown=12)
    assert found.cheapest in found.rows
    assert len(found.rows) == 12
    assert all(row.decode_tps is not None for row in found.rows)


def test_every_machine_of_the_catalog_is_compared_by_its_name() -> None:
    """But two that are sold with different memory, which has to be said."""
    for one in catalog_candidates(HostProfile(), {}, sold=False):
        (named,) = candidates([one.name], HostProfile(), {})
        assert (named.machine.name, named.price) == (one.machine.name, one.price)
