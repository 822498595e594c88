"""The table "bytes per step by axis and op": what a rank sent in one step, from the ledger.

Bytes are what the standard algorithms must send, not packets on a network. Rows are sorted by bytes; each names the
call sites that sent most.
"""

from rich.table import Table

from megalite.observe.ledger import Entry, Ledger

MAX_SITES = 3
"""Call sites that a row names."""

Sent = dict[Entry, tuple[int, int]]
"""Calls and bytes of each entry."""


def sent_so_far(ledger: Ledger) -> Sent:
    """A copy of the counts, which a reset does not change."""
    return {entry: (calls, ledger.sent_bytes[entry]) for entry, calls in ledger.calls.items()}


def traffic_table(sent: Sent, *, title: str) -> Table:
    """One row per axis and op, and the sum."""
    table = Table(title=title, title_justify="left")
    table.add_column("axis")
    table.add_column("op")
    for head in ("calls", "MB", "share"):
        table.add_column(head, justify="right")
    table.add_column("mostly from", overflow="fold")
    total = sum(num_bytes for _, num_bytes in sent.values())
    rows = sorted({(entry.axis, entry.op) for entry in sent}, key=lambda row: (-_sum(sent, row)[1], row))
    for axis, op in rows:
        calls, num_bytes = _sum(sent, (axis, op))
        share = f"{100 * num_bytes / total:.1f}%" if total else "-"
        table.add_row(axis, op, f"{calls:,}", f"{num_bytes / 1e6:,.3f}", share, _sites(sent, (axis, op)))
    table.add_section()
    table.add_row("all", "", f"{sum(calls for calls, _ in sent.values()):,}", f"{total / 1e6:,.3f}", "", "")
    return table


def _sum(sent: Sent, row: tuple[str, str]) -> tuple[int, int]:
    """Calls and bytes of an axis and op."""
    found = [counts for entry, counts in sent.items() if (entry.axis, entry.op) == row]
    return sum(calls for calls, _ in found), sum(num_bytes for _, num_bytes in found)


def _sites(sent: Sent, row: tuple[str, str]) -> str:
    """The sites that sent most; the passes of one site together."""
    by_site: dict[str, int] = {}
    for entry, (_, num_bytes) in sent.items():
        if (entry.axis, entry.op) == row:
            site = entry.site.removesuffix(".forward").removesuffix(".backward")
            by_site[site] = by_site.get(site, 0) + num_bytes
    names = sorted(by_site, key=lambda site: (-by_site[site], site))
    return ", ".join(names[:MAX_SITES]) + (", ..." if len(names) > MAX_SITES else "")
