"""The look of the HTML report: one style sheet, for wide and narrow screens, light and dark."""

__all__ = ["STYLE"]

STYLE = """
:root { color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --ink: #1d2126; --soft: #5c6570; --line: #dfe2e6;
  --pad: #e9e6e0; --pad-line: #cfcac0;
  --fixed: #8d8f94; --truncate: #3f7fb5; --greedy: #b9832f; --balanced: #23855a; --packed: #7a5bb0; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171a; --card: #1c2024; --ink: #e6e9ec; --soft: #a0a9b3; --line: #33393f;
  --pad: #31353a; --pad-line: #474d53;
  --fixed: #9a9da3; --truncate: #6ba8da; --greedy: #d9a657; --balanced: #4fbf8b; --packed: #a58bd6; --bad: #f2857d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 6px; }
h2 { font-size: 1.35rem; margin: 44px 0 4px; }
h3 { font-size: 1rem; margin: 26px 0 8px; }
p { margin: 6px 0 12px; max-width: 72ch; }
.soft, figcaption, small { color: var(--soft); }
figcaption { font-size: 0.9rem; margin: 0 0 10px; max-width: 76ch; }
figure { margin: 18px 0 26px; }
code { font: 0.9em ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 12px; margin: 18px 0 8px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px; }
.card b { display: block; font-size: 1.7rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: 0.9rem; }
.bars { display: grid; gap: 9px; }
.bar { display: grid; grid-template-columns: 8.2em minmax(0, 1fr) 9.5em; gap: 10px; align-items: center; }
.bar .name { font-weight: 600; overflow-wrap: anywhere; line-height: 1.2; }
.bar .value { font-variant-numeric: tabular-nums; font-size: 0.92rem; line-height: 1.25; }
.track { position: relative; height: 20px; background: var(--pad); border-radius: 3px; }
.fill { position: absolute; inset: 0 auto 0 0; border-radius: 3px; min-width: 2px; }
.spread { position: absolute; top: 9px; height: 2px; min-width: 1px; background: var(--ink); }
.spread::before, .spread::after { content: ""; position: absolute; top: -4px; width: 2px; height: 10px;
  background: var(--ink); }
.spread::before { left: -1px; } .spread::after { right: -1px; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; background: var(--card); }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 11px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--card); }
tr:last-child td, tr:last-child th { border-bottom: 0; }
thead th { color: var(--soft); font-weight: 500; }
table.facts td, table.facts th { white-space: normal; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
table.facts th { width: 11em; font-weight: 500; color: var(--soft); }
.wrong { color: var(--bad); font-weight: 600; }
.shapes { margin: 14px 0; }
.shapes .head { display: flex; flex-wrap: wrap; gap: 2px 12px; align-items: baseline; font-size: 0.92rem; }
.shapes svg { display: block; width: 100%; height: auto; margin-top: 4px; }
.histogram { display: flex; align-items: flex-end; gap: 2px; height: 150px; border-bottom: 1px solid var(--line); }
.histogram div { flex: 1; background: var(--balanced); min-height: 0; border-radius: 2px 2px 0 0; }
.axis { display: flex; justify-content: space-between; font-size: 0.85rem; color: var(--soft); margin-top: 4px; }
.key { display: inline-block; width: 0.85em; height: 0.85em; border-radius: 2px; vertical-align: -0.06em; }
.fixed { background: var(--fixed); fill: var(--fixed); }
.truncate { background: var(--truncate); fill: var(--truncate); }
.greedy { background: var(--greedy); fill: var(--greedy); }
.balanced { background: var(--balanced); fill: var(--balanced); }
.packed { background: var(--packed); fill: var(--packed); }
.padding { background: var(--pad); fill: var(--pad); stroke: var(--pad-line); stroke-width: 1; }
.other { opacity: 0.72; }
@media (max-width: 640px) {
  main { padding: 18px 14px 40px; }
  h1 { font-size: 1.4rem; }
  .bar { grid-template-columns: minmax(0, 1fr) auto; gap: 2px 10px; }
  .bar .track { grid-column: 1 / -1; grid-row: 2; }
  table.facts th { width: 8em; }
}
"""
