"""The store of responses, without a server: bounds in number, bytes and time, and keys apart from each other."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.serve.endpoints.responses_api.response_store import OVERHEAD, ResponseStore, StoredResponse


def response(id: str, size: int = 0) -> StoredResponse:
    """One whose texts have `size` bytes."""
    return StoredResponse(id, b"x" * (size // 2), b"x" * (size - size // 2), b"")


def test_what_is_stored_is_found_by_its_own_key_alone() -> None:
    store = ResponseStore(lambda: 0.0)
    assert store.put("alpha", response("a", 10))
    assert store.get("alpha", "a") == response("a", 10)
    assert store.get("beta", "a") is None
    assert not store.remove("beta", "a")
    assert store.remove("alpha", "a")
    assert store.get("alpha", "a") is None
    assert (store.count, store.bytes) == (0, 0)


def test_the_oldest_goes_first() -> None:
    store = ResponseStore(lambda: 0.0, most=3)
    for name in "abcd":
        store.put("", response(name))
    assert [name for name in "abcd" if store.get("", name)] == ["b", "c", "d"]
    small = ResponseStore(lambda: 0.0, most_bytes=3 * (OVERHEAD + 100))
    for name in "abcd":
        small.put("", response(name, 100))
    assert [name for name in "abcd" if small.get("", name)] == ["b", "c", "d"]


def test_a_key_displaces_its_own_responses_and_not_those_of_others() -> None:
    store = ResponseStore(lambda: 0.0, most=10, most_bytes=10 * (OVERHEAD + 1000))
    store.put("modest", response("m", 1000))
    for number in range(100):
        store.put("greedy", response(str(number), number * 20))
    assert store.get("modest", "m") is not None


def test_one_that_is_too_large_displaces_nothing() -> None:
    store = ResponseStore(lambda: 0.0, most_each=OVERHEAD + 100)
    store.put("", response("a", 100))
    assert not store.put("", response("b", 101))
    assert store.get("", "a") is not None
    assert store.get("", "b") is None


def test_events_count_too() -> None:
    assert StoredResponse("a", b"1", b"2", b"3", events=(b"45", b"6")).size == OVERHEAD + 6


def test_time_to_live() -> None:
    now = 0.0
    store = ResponseStore(lambda: now, time_to_live=10)
    store.put("", response("a"))
    now = 5.0
    store.put("", response("b"))
    now = 9.99
    assert store.get("", "a") is not None
    now = 10.0
    assert store.get("", "a") is None
    assert store.get("", "b") is not None
    now = 15.0
    store.expire()
    assert (store.count, store.bytes) == (0, 0), "also where no request comes"


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 400)), max_size=60), st.integers(0, 6))
def test_the_newest_is_there_unless_it_is_too_large(puts: list[tuple[str, int]], most: int) -> None:
    """Also where its key holds the largest share with it alone."""
    store = ResponseStore(lambda: 0.0, most=most, most_bytes=2 * OVERHEAD, most_each=OVERHEAD + 300)
    for number, (tenant, size) in enumerate(puts):
        fits = store.put(tenant, response(str(number), size))
        assert fits == (size <= 300 and most > 0)
        assert (store.get(tenant, str(number)) is not None) == fits


class Machine(RuleBasedStateMachine):
    """The store beside a plain list that knows everything that was ever put, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.most, self.most_bytes = 5, 5 * OVERHEAD + 1500
        self.store = ResponseStore(
            lambda: self.now, self.most, self.most_bytes, most_each=OVERHEAD + 1000, time_to_live=100
        )
        self.put: list[tuple[str, float, StoredResponse]] = []
        self.removed: set[str] = set()

    @rule(tenant=st.sampled_from("xyz"), size=st.integers(0, 1200))
    def store_one(self, tenant: str, size: int) -> None:
        one = response(str(len(self.put)), size)
        assert self.store.put(tenant, one) == (one.size <= OVERHEAD + 1000)
        self.put.append((tenant, self.now, one))

    @precondition(lambda self: self.put)
    @rule(data=st.data())
    def remove_one(self, data: st.DataObject) -> None:
        tenant, _, one = data.draw(st.sampled_from(self.put))
        was_there = self.store.get(tenant, one.id) is not None
        assert self.store.remove(tenant, one.id) == was_there
        self.removed.add(one.id)

    @rule(seconds=st.floats(0, 60))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def bounds_are_kept(self) -> None:
        there = [(tenant, at, one) for tenant, at, one in self.put if self.store.get(tenant, one.id) is one]
        assert self.store.count == len(there) <= self.most
        assert self.store.bytes == sum(one.size for _, _, one in there) <= self.most_bytes
        assert all(self.now < at + 100 and one.id not in self.removed for _, at, one in there)
        for name in "xyz":  # of one key, the oldest go first
            own = [one for tenant, _, one in self.put if tenant == name and one.size <= OVERHEAD + 1000]
            own = [one for one in own if one.id not in self.removed]
            kept = [self.store.get(name, one.id) is one for one in own]
            assert kept == sorted(kept), "an older one was kept and a newer one was not"


TestMachine = Machine.TestCase
