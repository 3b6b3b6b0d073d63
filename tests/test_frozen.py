"""The quick dataclasses are what the standard library's are."""

import copy
import dataclasses
import pickle
from functools import cached_property
from typing import Any

import pytest

from uma.frozen import dataclass


def made(decorate: Any, **options: Any) -> Any:
    @decorate(**options)
    class Size:
        """A size."""

        name: str
        size_bytes: int = 0
        parts: list[int] = dataclasses.field(default_factory=list)
        note: str = dataclasses.field(default="", repr=False, compare=False)

        @property
        def double(self) -> int:
            return 2 * self.size_bytes

    return Size


@dataclass(frozen=True, slots=True)
class Kept:
    name: str
    parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Other:
    name: str
    parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Checked:
    number: int = 0

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError(self.number)


@dataclass(frozen=True)
class Counted:
    number: int

    @cached_property
    def square(self) -> int:
        return self.number**2


Size = made(dataclass, frozen=True, slots=True)
Standard = made(dataclasses.dataclass, frozen=True, slots=True)


def test_it_is_a_dataclass_with_the_same_fields_defaults_and_text() -> None:
    assert [f.name for f in dataclasses.fields(Size)] == [
        f.name for f in dataclasses.fields(Standard)
    ]
    ours, theirs = Size("weights", 5), Standard("weights", 5)
    assert repr(ours) == repr(theirs)
    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
    assert ours.parts is not Size("weights").parts
    assert ours.double == 10
    assert Size.__match_args__ == Standard.__match_args__
    assert Size.__init__.__annotations__["size_bytes"] is int


def test_it_is_equal_and_hashed_by_the_fields_that_are_compared() -> None:
    assert Kept("a", (1,)) == Kept("a", (1,)) != Kept("a", (2,))
    assert len({Kept("a"), Kept("a"), Kept("b")}) == 2
    assert Size("a", note="x") == Size("a", note="y")
    assert Kept("a") != Other("a")
    with pytest.raises(TypeError, match="unhashable"):
        hash(Size("a"))


def test_it_is_frozen_and_has_no_room_for_more() -> None:
    one = Kept("a")
    for change in (
        lambda: setattr(one, "name", "b"),
        lambda: setattr(one, "other", 1),
        lambda: delattr(one, "name"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert not hasattr(one, "__dict__")


def test_it_is_replaced_copied_and_pickled() -> None:
    one = Kept("a", (1, 2))
    assert dataclasses.replace(one, name="b") == Kept("b", (1, 2))
    assert copy.deepcopy(one) == one == pickle.loads(pickle.dumps(one))


def test_arguments_are_checked_as_the_standard_ones_are() -> None:
    for arguments in ({}, {"name": "a", "else": 1}):
        with pytest.raises(TypeError):
            Kept(**arguments)


def test_a_class_of_few_instances_is_the_same_once_it_has_many() -> None:
    size = made(dataclass, frozen=True, slots=True)
    few, *_, many = (size("a", 1, note="n") for _ in range(100))
    assert few == many == size(size_bytes=1, name="a")
    assert repr(few) == repr(many) == repr(Standard("a", 1, note="n"))
    assert few.parts is not many.parts
    assert few.note == many.note == "n"


@pytest.mark.parametrize("made_before", [0, 100])
def test_the_same_argument_is_not_taken_twice(made_before: int) -> None:
    size = made(dataclass, frozen=True, slots=True)
    for _ in range(made_before):
        size("a")
    for values, named in ((("a",), {"name": "b"}), (("a", 1, [], "", 5), {}), ((), {"parts": []})):
        with pytest.raises(TypeError, match=r"Size\.__init__\(\)"):
            size(*values, **named)


def test_what_checks_an_instance_is_called_as_it_is_made() -> None:
    assert Checked(1).number == 1
    with pytest.raises(ValueError, match="-1"):
        Checked(-1)


def test_without_slots_what_is_counted_once_is_kept() -> None:
    one = Counted(3)
    assert one.square == 9
    assert one.__dict__["square"] == 9
    assert one == Counted(3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.number = 4  # type: ignore[misc]
