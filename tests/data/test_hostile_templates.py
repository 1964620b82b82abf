"""A template of a stranger ends within its limits, and ends in a sentence."""

import inspect

import pytest

from recurjax.errors import UserError

pytest.importorskip("jinja2", reason="needs recurjax[serve]")

from recurjax.data.chat import TemplateProcess  # noqa: E402

_LONG = "{% for a in range(99999) %}{% for b in range(99999) %}"
ENDLESS = {
    "power": "{{ 9 ** (9 ** 9) }}",
    "power_at_run_time": "{{ 7 ** (8 ** (9 + messages|length)) }}",
    "loops": _LONG + "{% endfor %}{% endfor %}",
    "loops_that_write_nothing": _LONG
    + "{% if a < 0 %}x{% endif %}{% endfor %}{% endfor %}",
    "macro_of_two_calls": "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}"
    "{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive_loop": "{% for a in range(9) recursive %}{% if loop.depth < 40 %}"
    "{{ loop(range(9)) }}{% endif %}{% endfor %}",
    "sums": "{% for a in range(99999) %}{{ range(99999)|sum }}{% endfor %}",
    "sorts": "{% for a in range(99999) %}{% if range(99999)|sort|length < 0 %}x"
    "{% endif %}{% endfor %}",
    "json": "{% for a in range(99999) %}{% if (range(9999)|list|tojson)|length < 0 %}x"
    "{% endif %}{% endfor %}",
    "groups": "{% for a in range(99999) %}{% for b in range(9999)|batch(2) %}"
    "{% endfor %}{% endfor %}",
    "digits": "{% set ns = namespace(x=7) %}{% for a in range(40) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x|string|length }}",
    "unique": "{% for a in range(99999) %}{% if range(9999)|unique|list|length < 0 %}x"
    "{% endif %}{% endfor %}",
}
LARGE = {
    "text": "{{ 'a' * 10 ** 10 }}",
    "list": "{{ ([0] * 10 ** 10)|length }}",
    "tuple": "{{ ((1, 2) * 10 ** 9)|length }}",
    "center": "{{ 'a'|center(10 ** 10) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "zfill": "{{ 'a'.zfill(10 ** 10) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "indent": "{{ 'a\nb'|indent(10 ** 10) }}",
    "json_indent": "{{ [1]|tojson(indent=10 ** 10) }}",
    "tabs": "{{ ('\t' * 1000).expandtabs(10 ** 9) }}",
    "replace": "{{ ('a' * 10 ** 5).replace('a', 'b' * 10 ** 5) }}",
    "doubled_text": "{% set ns = namespace(x='ab') %}{% for a in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x|length }}",
    "doubled_list": "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|length }}",
    "join": "{{ (range(99999)|join('a' * 99999))|length }}",
    "repeated_list": "{{ ([messages] * 10 ** 9)|length }}",
    "shift": "{{ 'a' * (2 ** 40) }}",
}
WRONG = {
    "nested_brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested_lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "nested_ifs": "{% if 1 %}" * 3000 + "x" + "{% endif %}" * 3000,
    "nested_loops": "{% for a in [1] %}" * 60 + "x" + "{% endfor %}" * 60,
    "nested_macros": "{% macro f() %}" * 500 + "x" + "{% endmacro %}" * 500,
    "long_sum": "{{ " + "1 + " * 20000 + "1 }}",
    "macro_of_itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "list_in_itself": "{% set ns = namespace(x=1) %}{% set ns.x = ns %}{{ ns|tojson }}",
    "unknown_tag": "{% execute 'ls' %}",
    "unclosed": "{{ messages",
    "unclosed_block": "{% for m in messages %}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os }}",
    "extends": "{% extends 'base' %}",
    "unknown_filter": "{{ messages|system }}",
    "division": "{{ 1 / 0 }}",
    "modulo": "{{ 1 % 0 }}",
    "missing": "{{ a.b.c }}",
    "index": "{{ [][1][2] }}",
    "sum_of_texts": "{{ messages + 'a' }}",
    "number_of_text": "{{ 'a'.split('') }}",
    "overflow": "{{ (2.0 ** 9999) }}",
    "many_digits": "{{ ('9' * 9999)|int * 1 ~ '' }}",
    "range": "{{ range(10 ** 9)|list }}",
    "class": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "attribute": "{{ (''|attr('__class__')).mro() }}",
    "change": "{{ messages.append(1) }}",
    "format_escape": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "loop_over_number": "{% for a in 5 %}{% endfor %}",
    "not_called": "{{ 5() }}",
    "bad_unpacking": "{% for a, b in [1, 2] %}{% endfor %}",
    "too_long_a_message": "{{ raise_exception('a' * 10 ** 7) }}",
    "a_message_of_lines": "{{ raise_exception('a\n\n\nb') }}",
    "too_long": "{{ 'a' * 10 ** 6 }}",
    "many_pieces": "{% for a in range(99999) %}{{ 'a' * 99 }}{% endfor %}",
}
HARMLESS = {
    # These do nothing that goes over a limit: they render, the first two nothing.
    "globals",
    "format_escape",
    "many_digits",
    "long_sum",
    "nested_loops",
}
QUICK = {"power", "loops_that_write_nothing"}


@pytest.fixture(scope="module")
def process():
    limited = TemplateProcess(seconds=1, memory=2**28, characters=10**5)
    yield limited
    limited.close()


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            source,
            id=name,
            marks=[pytest.mark.slow] if group is ENDLESS and name not in QUICK else [],
        )
        for group in (ENDLESS, LARGE, WRONG)
        for name, source in group.items()
    ],
)
def test_a_hostile_template_ends_in_a_sentence(source, process, request):
    """A chat template, of a checkpoint or `--template`, runs in jinja2's sandbox, in a
    process of its own.
    """
    values = [{"messages": [{"role": "user", "content": "hi"}]}]
    try:
        process.render(source, values)
    except UserError as error:
        said = str(error)
        assert said.startswith("the chat template ")
        assert len(said) < 600 and "\n" not in said
    else:
        assert request.node.callspec.id in HARMLESS
    # The next one is rendered, by the same process or another one.
    assert process.render("{{ messages[0].content }}", values) == ["hi"]


def test_a_template_without_end_is_told_by_its_processor_time(process):
    with pytest.raises(UserError, match="fails: it takes more than 1 s of processor"):
        process.render(ENDLESS["loops"], [{}])


def test_a_text_that_is_too_long_and_too_large_is_told(process):
    with pytest.raises(UserError, match="fails: it writes more than 100,000 char"):
        process.render(WRONG["too_long"], [{}])
    with pytest.raises(UserError, match="it fills the memory that a template may take"):
        process.render("{{ n * 'a' }}", [{"n": 10**10}])


def test_a_template_has_bounds_where_none_are_named():
    """The kernel ends that process after 5 s of processor time or 1 GiB of memory (on
    macOS after the time alone). A rendered text has at most 2^25 characters.
    """
    options = inspect.signature(TemplateProcess).parameters.values()
    bounds = {option.name: option.default for option in options}
    assert bounds == {"seconds": 5, "memory": 2**30, "characters": 2**25}


def test_a_process_that_was_killed_is_started_again(process):
    assert process.render("a", [{}]) == ["a"]
    process._process.kill()
    with pytest.raises(UserError, match="the process that renders it ended"):
        process.render("a", [{}])
    assert process.render("a", [{}]) == ["a"]


def test_what_is_no_json_is_refused_in_a_sentence(process):
    with pytest.raises(UserError, match="the messages or options do not fit into JSON"):
        process.render("a", [{"x": object()}])
