"""The longest chain of dependent steps, on functions whose chain can be counted by eye."""

import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.cli.chains import Chain, longest_chain

X = np.ones(8, np.float32)


def sines(x, number):
    for _ in range(number):
        x = jnp.sin(x)
    return x


def test_the_longest_path_counts_and_not_the_number_of_steps():
    assert longest_chain(lambda x: sines(x, 3) + sines(x, 5) + sines(x, 1), X) == Chain(7, True)


def test_moving_numbers_takes_no_step():
    assert longest_chain(lambda x: jnp.concatenate([x[::2], x[:3]]).reshape(7, 1).T.astype(jnp.float16), X).steps == 0


def test_a_product_of_matrices_is_one_step_whatever_its_size():
    for size in (2, 512):
        assert longest_chain(jnp.matmul, np.ones((size, size)), np.ones((size, size))).steps == 1


def test_a_scan_multiplies_what_hangs_on_its_carry():
    def run(x, length):
        return jax.lax.scan(lambda carry, _: (sines(carry, 2), None), x, length=length)

    assert [longest_chain(functools.partial(run, length=length), X).steps for length in (0, 1, 10)] == [0, 2, 20]


def test_a_scan_adds_what_does_not_hang_on_its_carry_once():
    def run(x):
        return jax.lax.scan(lambda total, each: (total + sines(each, 5), total), jnp.float32(0), x)

    assert longest_chain(run, np.ones(10, np.float32)).steps == 5 + 10


def test_a_map_counts_its_body_once():
    assert longest_chain(lambda x: jax.lax.map(lambda each: sines(each, 4), x), X).steps == 4


def test_scans_inside_scans_multiply():
    def inner(x, _):
        return jax.lax.scan(lambda y, _: (jnp.sin(y), None), x, length=5)[0], None

    assert longest_chain(lambda x: jax.lax.scan(inner, x, length=7), X).steps == 35


def test_a_backward_pass_runs_through_its_scan_once_more():
    def run(x):
        return jax.lax.scan(lambda carry, _: (jnp.sin(carry), None), x, length=10)[0]

    forward, both = longest_chain(run, 1.0).steps, longest_chain(jax.grad(run), 1.0).steps
    assert forward == 10
    assert 2 * forward <= both <= 3 * forward


def test_the_longest_branch_of_a_cond_counts():
    def run(x):
        return jax.lax.cond(x.sum() > 0, lambda y: sines(y, 6), lambda y: y, x)

    assert longest_chain(run, X).steps == 6
    assert longest_chain(lambda x: jax.lax.cond(sines(x, 9).sum() > 0, jnp.sin, jnp.cos, x), X).steps >= 9 + 1


@pytest.mark.parametrize(
    "wrap", [jax.jit, jax.checkpoint, jax.custom_jvp, lambda fn: jax.custom_vjp(fn), lambda fn: jax.vmap(jax.jit(fn))]
)
def test_calls_are_looked_into(wrap):
    fn = functools.partial(sines, number=4)
    wrapped = wrap(fn)
    if isinstance(wrapped, jax.custom_jvp):
        wrapped.defjvp(lambda primals, tangents: (fn(*primals), tangents[0]))
    if isinstance(wrapped, jax.custom_vjp):
        wrapped.defvjp(lambda x: (fn(x), None), lambda _, cotangent: (cotangent,))
    assert longest_chain(wrapped, X) == Chain(4, True)


def test_a_while_with_a_counter_has_as_many_trips_as_it_counts():
    def count_to(bound, by=1):
        def run(x):
            return jax.lax.while_loop(lambda c: c[0] < bound, lambda c: (c[0] + by, sines(c[1], 2)), (0, x))[1]

        return run

    assert longest_chain(count_to(6), X) == Chain(12, True)
    assert longest_chain(count_to(7, by=3), X) == Chain(6, True)
    assert longest_chain(lambda x: jax.lax.fori_loop(0, 5, lambda _, y: jnp.sin(y), x), X) == Chain(5, True)


def test_a_while_of_unknown_length_gives_a_lower_bound_that_says_so():
    def run(x):
        return jax.lax.while_loop(lambda y: y.sum() > 0, lambda y: sines(y, 2), x)

    assert longest_chain(run, X) == Chain(2, False)


def test_attention_waits_no_longer_for_a_longer_sequence_and_a_recurrence_does():
    def attend(q):
        return aj.attention(q, q, q, aj.Causal())

    def recur(q):
        return jax.lax.scan(lambda h, x: (jnp.tanh(h + x), h), q[0], q)

    def prefix_sums(q):
        return jax.lax.associative_scan(jnp.add, q)

    def chain(fn, length):
        return longest_chain(fn, np.ones((length, 4), np.float32)).steps

    assert chain(attend, 16) == chain(attend, 256)
    assert chain(recur, 256) == 16 * chain(recur, 16) == 512
    assert chain(prefix_sums, 256) < 4 * chain(prefix_sums, 16)
    grows = [chain(prefix_sums, 2**n) - chain(prefix_sums, 2 ** (n - 1)) for n in range(3, 9)]
    assert len(set(grows)) == 1  # a constant more for each doubling


def test_code_with_its_own_batching_rule_is_looked_into():
    fn = jax.custom_batching.custom_vmap(lambda x: sines(x, 4))
    fn.def_vmap(lambda size, mapped, x: (jax.vmap(lambda each: sines(each, 4))(x), True))
    assert longest_chain(fn, X) == Chain(4, True)


def test_a_primitive_that_is_not_of_jax_gives_a_lower_bound_that_says_so():
    hidden = jax.extend.core.Primitive("hidden")
    hidden.def_abstract_eval(lambda x: x)
    assert longest_chain(lambda x: jnp.sin(hidden.bind(x)), X) == Chain(2, False)
