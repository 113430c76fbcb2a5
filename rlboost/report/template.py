"""The page around a report's parts."""

from __future__ import annotations

from string import Template

PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>RLBoost: $name</title>
<style>
:root { color-scheme: light; --ink: #1f2933; --muted: #5b6773; --line: #e3e8ed; --good: #00704f; --bad: #b34700; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f7f9; color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 64px; }
header p { max-width: 72ch; color: var(--muted); margin: 8px 0 0; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.01em; margin: 0; }
h2 { font-size: 19px; margin: 0 0 14px; }
h1 .verdict { display: inline-block; vertical-align: 5px; margin-left: 10px; padding: 3px 12px; border-radius: 999px;
  font-size: 14px; font-weight: 600; letter-spacing: 0; color: #fff; }
.verdict.good { background: var(--good); }
.verdict.bad { background: var(--bad); }
.verdict.open { background: var(--muted); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 26px 0 20px; }
.card, section { background: #fff; border: 1px solid var(--line); border-radius: 12px; }
.card { padding: 14px 16px; }
.card b { display: block; font-size: 27px; line-height: 1.2; font-variant-numeric: tabular-nums; }
.card span { display: block; font-weight: 600; }
.card small, article small { color: var(--muted); font-size: 13px; }
section { padding: 22px 24px; margin-top: 20px; }
figure { margin: 0; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { max-width: 90ch; margin-top: 12px; color: var(--muted); font-size: 14px; }
table { border-collapse: collapse; width: 100%; font-size: 14.5px; }
td { padding: 6px 16px 6px 0; border-top: 1px solid var(--line); vertical-align: top; }
tr:first-child td { border-top: 0; }
td.n { text-align: right; font-variant-numeric: tabular-nums; padding-right: 0; white-space: nowrap; }
td.good, td.bad { font-weight: 600; white-space: nowrap; }
td.good { color: var(--good); }
td.bad, p.bad { color: var(--bad); }
article { margin-top: 14px; }
article p { margin: 0 0 6px; }
pre { margin: 0; padding: 10px 14px; border-radius: 8px; background: #f5f7f9; font-size: 13px; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 20px; }
.columns section { margin-top: 20px; }
@media print { body { background: #fff; } section { break-inside: avoid; } }
</style>
</head>
<body>
<main>
<header>
<h1>RLBoost: $name <span class="verdict $verdict_class">$verdict</span></h1>
<p>$intro</p>
$warnings
</header>
<div class="cards">$cards</div>
$body
</main>
</body>
</html>
""")

DEMO = Template("""\
<section id="audit"><h2>Guarantees</h2>$guarantees</section>
$sections
<section id="journeys"><h2>Samples that survived a preemption</h2>$journeys</section>
<div class="columns">
<section id="counters"><h2>The audit</h2>$counters</section>
<div>
<section id="cpu_time"><h2>CPU time</h2>$cpu_time</section>
<section id="settings"><h2>This run</h2>$settings</section>
</div>
</div>""")

JOB = Template("""\
$sections
<section id="warnings"><h2>Warnings</h2>$warnings</section>
<div class="columns">
<section id="metrics"><h2>Metrics of the last step</h2>$metrics</section>
<div>
<section id="counters"><h2>The audit</h2>$counters</section>
<section id="settings"><h2>Job file</h2><pre>$job_file</pre></section>
</div>
</div>""")
