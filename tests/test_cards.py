"""Tables become cards: every cell knows its heading, and nothing else of the page changes."""

import re

from lmperf.cards import with_cards

PAGE = """<!doctype html>
<style>td > div { color: red; }</style>
<p>a &lt; b – 文</p>
<table><thead><tr><th>name</th><th class="num">95 %
 <b>"in</b>terval"</th></tr></thead><tbody>
<tr><td><b>x</b></td><td class="num"> – </td></tr>
<tr><td></td><td>0<br><small>why &amp; how</small></td><td>more</td></tr>
</tbody></table>
<table><tbody><tr><td><img src="data:,"></td></tr></tbody></table>
"""


def test_every_cell_gets_the_heading_of_its_column():
    found = re.findall(r"<td[^>]*>", with_cards(PAGE))
    assert found == [
        '<td data-label="name">', '<td data-label="95 % &quot;interval&quot;" data-empty class="num">',
        '<td data-label="name" data-empty>', '<td data-label="95 % &quot;interval&quot;">', "<td>", "<td>",
    ]  # fmt: skip


def test_nothing_else_changes():
    changed = with_cards(PAGE)
    assert changed.count("<div>") == changed.count("</div>") == 6
    assert re.sub(r"</?div>| data-label=\"[^\"]*\"| data-empty", "", changed) == PAGE


def test_a_page_without_tables_stays_as_it_is():
    assert with_cards("<p>a\r\nb</p>") == "<p>a\r\nb</p>"
