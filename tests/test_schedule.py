"""Which prompt goes next: beside brute force, with nothing passed without end."""

from __future__ import annotations

import random

import pytest

from radixkv.schedule import Waiting
from radixkv.token_key import token_key


def shared_tokens(left: bytes, right: bytes) -> int:
    shared = 0
    while shared < min(len(left), len(right)) // 4 and left[4 * shared : 4 * shared + 4] == right[4 * shared : 4 * shared + 4]:
        shared += 1
    return shared


def random_keys(numbers: random.Random, count: int, *, alphabet: int = 3, longest: int = 8) -> list[bytes]:
    """Few letters, so that prefixes are shared at every depth; some keys are prefixes of others, some occur twice."""
    return [token_key([numbers.randrange(alphabet) for _ in range(numbers.randint(1, longest))]) for _ in range(count)]


def document_keys(numbers: random.Random, num_documents: int, count: int, *, template: int = 5) -> list[bytes]:
    documents = [[numbers.randrange(1000) for _ in range(40)] for _ in range(num_documents)]
    rows = [[*range(template), *numbers.choice(documents), *(numbers.randrange(1000) for _ in range(6))] for _ in range(count)]
    return [token_key(row) for row in rows]


def take_all(waiting: Waiting) -> list[int]:
    taken = []
    while waiting:
        place = waiting.next()
        assert waiting.next() == place and waiting.take() == place
        taken.append(place)
    return taken


@pytest.mark.parametrize("seed", range(30))
def test_each_shares_as_much_as_any_could_with_the_one_before(seed: int) -> None:
    keys = random_keys(random.Random(seed), 40)
    taken = take_all(Waiting(keys, [0] * len(keys), most_passed=1000))
    assert sorted(taken) == list(range(len(keys))) and taken[0] == 0
    for step in range(1, len(taken)):
        last = keys[taken[step - 1]]
        most = max(shared_tokens(keys[place], last) for place in taken[step:])
        assert shared_tokens(keys[taken[step]], last) == most


@pytest.mark.parametrize("seed", range(10))
def test_every_prefix_is_left_only_when_nobody_waits_for_it(seed: int) -> None:
    """The walk is depth first: prompts of one prefix, of whatever length, stand next to each other."""
    keys = random_keys(random.Random(100 + seed), 60)
    taken = take_all(Waiting(keys, [0] * len(keys), most_passed=1000))
    for prefix in {key[:end] for key in keys for end in range(4, len(key) + 1, 4)}:
        steps = [step for step, place in enumerate(taken) if keys[place].startswith(prefix)]
        assert steps == list(range(steps[0], steps[0] + len(steps)))


def test_documents_go_in_the_order_of_their_oldest_question() -> None:
    numbers = random.Random(3)
    keys = document_keys(numbers, 6, 50)
    taken = take_all(Waiting(keys, [0] * len(keys), most_passed=1000))
    documents = [keys[place][20:180] for place in taken]
    order = list(dict.fromkeys(documents))
    assert documents == sorted(documents, key=order.index)
    assert order == list(dict.fromkeys(key[20:180] for key in keys))


def test_what_is_cached_goes_first() -> None:
    """Most of all the longest, then what shares it, then everything else that is cached at all beyond what all share."""
    numbers = random.Random(4)
    keys = document_keys(numbers, 4, 40)
    documents = list(dict.fromkeys(key[20:180] for key in keys))
    cached = {documents[2]: 45, documents[3]: 20}
    taken = take_all(Waiting(keys, [cached.get(key[20:180], 5) for key in keys], most_passed=1000))
    assert list(dict.fromkeys(keys[place][20:180] for place in taken)) == [documents[2], documents[3], documents[0], documents[1]]


def test_given_order() -> None:
    keys = random_keys(random.Random(5), 30)
    assert take_all(Waiting(keys, [9] * 30, "given")) == list(range(30))


@pytest.mark.parametrize("most_passed", [0, 1, 5, 20])
@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_passed_without_end(seed: int, most_passed: int) -> None:
    """The prompt given as number n waits for at most (n + 1) * (most_passed + 1) others, whatever they share."""
    numbers = random.Random(200 + seed)
    keys = document_keys(numbers, 5, 150)
    taken = take_all(Waiting(keys, [0] * len(keys), most_passed=most_passed))
    assert sorted(taken) == list(range(len(keys)))
    for step, place in enumerate(taken):
        assert step <= (place + 1) * (most_passed + 1)


def test_an_aged_prompt_takes_its_relatives_along() -> None:
    """Going first must not cost every prompt its prefix: the walk goes on from the aged one."""
    lone, crowd = token_key([7] * 10 + [1]), [token_key([1] * 10 + [i]) for i in range(100)]
    relatives = [token_key([7] * 10 + [2 + i]) for i in range(5)]
    keys = [crowd[0], lone, *relatives, *crowd[1:]]
    taken = take_all(Waiting(keys, [0] * len(keys), most_passed=30))
    assert taken.index(1) == 32 and sorted(taken[32:38]) == [1, 2, 3, 4, 5, 6]


def test_what_was_put_back_goes_first_the_last_one_foremost() -> None:
    keys = random_keys(random.Random(6), 10)
    waiting = Waiting(keys, [0] * 10)
    first, second, third = (waiting.take() for _ in range(3))
    assert len(waiting) == 7
    waiting.put_back(third, keys[third] + token_key([5]))
    waiting.put_back(second, keys[second])
    assert len(waiting) == 9 and waiting.key(third) == keys[third] + token_key([5])
    assert [waiting.take(), waiting.take()] == [second, third]
    assert sorted([first, second, third, *take_all(waiting)]) == list(range(10))


def test_nothing_to_wait_for() -> None:
    assert not Waiting([], [])


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="order must be one of 'cache', 'given', got 'random'"):
        Waiting([token_key([1])], [0], "random")  # type: ignore[arg-type]
