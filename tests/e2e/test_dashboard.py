#!/usr/bin/python3
"""The dashboard in a headless Chromium, with a job that trains, loses a worker and is cancelled: what it shows is what the service says, it is
complete for keyboards, screen readers, phones and dark rooms, nothing from outside is taken for markup, and the console has nothing to complain
about. Screenshots are kept in the build folder.

    test_dashboard.py [TEST...]"""

import contextlib
import json
import os
import re
import socket

from browser import Browser
from harness import BUILD, FAST, Cluster, api, check, main, tiny_job
from test_http import api_of, http_address

SHOTS = os.path.join(BUILD, "screenshots")
EVIL = "<img src=x onerror=alert(1)>"

CONTRAST = """(() => {
  const probe = document.body.appendChild(document.createElement('i'));
  const light = name => {
    probe.style.color = `var(${name})`;
    const [r, g, b] = getComputedStyle(probe).color.match(/[0-9.]+/g).map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : Math.pow((v + 0.055) / 1.055, 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), bad = [];
  for (const name of ['--text', '--soft', '--good', '--warn', '--bad', '--info', '--accent'])
    if (ratio(light(name), light('--panel')) < 4.5) bad.push(`${name} ${ratio(light(name), light('--panel')).toFixed(2)}`);
  for (const name of ['--member', '--spare', '--attaching', '--suspect', '--draining', '--lost', '--down'])
    if (ratio(light(name), 1) < 4.5) bad.push(`${name} under white ${ratio(light(name), 1).toFixed(2)}`);
  probe.remove();
  return bad.join(', ');
})()"""

NAMELESS = """[...document.querySelectorAll('button, input, select, svg[role=img], [role=img], ul, section')].filter(e => !e.closest('[hidden]') &&
  !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') || e.closest('label') || (e.tagName === 'BUTTON' && e.textContent.trim()) || e.closest('#alarms'))).map(e => e.outerHTML.slice(0, 80)).join('; ')"""


@contextlib.contextmanager
def watched(workers):
    os.makedirs(SHOTS, exist_ok=True)
    with Cluster() as cluster, Browser(cluster.dir) as browser:
        cluster.start_coordinator(flags=[*FAST, "--http", "127.0.0.1:0"])
        for i in range(workers):
            cluster.start_worker(name=f"w{i}", flags=["--vitals-every", "100"])
        yield cluster, browser, http_address(cluster)


def look(browser, address, width=1440, height=900, dark=False):
    browser.window(width, height, dark)
    browser.open(f"http://{address[0]}:{address[1]}/")
    browser.wait("document.body && document.body.dataset.turns >= 1")


def text_of(browser, selector):
    return browser.eval(f"document.querySelector({selector!r})?.innerText || ''")


def value_of(browser, selector):
    return float(browser.eval(f"document.querySelector({selector!r})?.dataset.value ?? 'nan'"))


def recovery_is_told(browser, go):
    browser.wait("document.querySelector('#recoveries td.text')")
    row, ms = text_of(browser, "#recoveries tbody"), float(re.search(r"after (\d+) ms", go.text).group(1))
    check("worker w1 lost" in row and "2 workers went on" in row and f"{ms / 1000:.3f}" in row, f"{row!r} of {go.text!r}")
    browser.wait("document.querySelector('[data-state=down]')?.dataset.value === '1'")
    check(value_of(browser, "[data-state=member]") == 2, text_of(browser, "#workers"))
    alarms, health = text_of(browser, "#alarms"), text_of(browser, "#health")
    host = socket.gethostname()
    check(f"worker w1 on {host} is down for" in alarms and re.search(r"failures have cost [\d.]+ m?s of workers", alarms), f"what it costs: {alarms!r}")
    step = re.search(r"at step (\d+)", go.text).group(1)
    check(re.search(rf"[\d:]+ tiny: worker w1 lost \(.*\) on {host}\. [\d.]+ m?s later the job went on with 2 workers from step {step}, no step done again", alarms), f"what happened: {alarms!r}")
    check("1 of 1 job" in health and re.search(r"tiny in generation \d+ with 2 workers", health) and "to look at" in health, health)


def keys_reach_everything(browser):
    check(not browser.eval(NAMELESS), f"without a name: {browser.eval(NAMELESS)}")
    check(browser.eval("document.documentElement.lang") == "en" and browser.eval("document.querySelectorAll('h1').length") == 1, "language or heading")
    names = browser.eval("[...document.querySelectorAll('[data-worker]')].map(e => e.dataset.worker).join()").split(",")
    wanted, reached = {"range", "theme", "job-tiny", "chart-loss", f"worker-{names[0]}", "important"}, set()
    for _ in range(30):
        browser.key("Tab")
        reached.add(browser.eval("document.activeElement.id || document.activeElement.dataset.key || ''"))
    check(wanted <= reached, f"the tab key reaches only {sorted(reached)}")
    browser.eval("document.querySelector('[data-worker]').focus()")
    browser.key("ArrowRight")
    check(browser.eval("document.activeElement.dataset.worker") == names[1], "the arrow key does not move")
    browser.eval("document.activeElement.click()")
    check(f"{names[1]}: member" in text_of(browser, "#worker-detail"), text_of(browser, "#worker-detail"))
    turns = int(browser.eval("document.body.dataset.turns"))
    browser.wait(f"document.body.dataset.turns > {turns + 1}")
    check(browser.eval("document.activeElement.dataset.worker") == names[1], "the focus is lost when the page is refreshed")


def a_look_at_a_tile_tells_how_the_worker_is(cluster, browser):
    """By mouse and by keyboard, and the chosen one's below the tiles."""
    tip = "document.querySelector('#worker-tip')"
    for event, name in (("mouseover", "w0"), ("focusin", "w2")):
        browser.eval(f"document.querySelector('[data-worker={name}]').dispatchEvent(new Event('{event}', {{bubbles: true}}))")
        browser.wait(f"{tip}.style.display === 'block' && {tip}.innerText.includes('processors ')")
        said = text_of(browser, "#worker-tip")
        check(said.startswith(f"{name}: member") and f"host {socket.gethostname()}" in said and re.search(r"rank \d.*, 1 thread", said) and re.search(r"memory [\d.]+ [kMG]B, host [\d.]+ %", said) and re.search(r"disk [\d.]+ [kMGT]B free", said), said)
    browser.eval("document.querySelector('[data-worker=w2]').click()")
    browser.wait("document.querySelector('#worker-detail').innerText.includes('processors ')")
    browser.eval("document.querySelector('[data-worker=w2]').dispatchEvent(new Event('focusout', {bubbles: true}))")
    check(browser.eval(f"{tip}.style.display") == "none", "the tip stays")


def test_a_failing_job_is_shown_as_it_is():
    with watched(3) as (cluster, browser, address):
        cluster.submit(tiny_job(cluster, steps=10000000, eval__every=0, checkpoint_every=200))
        cluster.wait_together(3)
        cluster.workers[1].kill()
        lost = cluster.wait_event("worker_lost")
        go = cluster.wait_event("generation_go", after=lost.number)
        look(browser, address)
        recovery_is_told(browser, go)
        for name, width, dark in (("phone", 390, False), ("dark", 1440, True), ("light", 1440, False)):
            look(browser, address, width, 844 if width < 600 else 900, dark)
            browser.wait("document.querySelector('#chart-loss path')")
            check(browser.eval("document.documentElement.scrollWidth") <= width, f"{name}: wider than its window")
            check(not browser.eval(CONTRAST), f"{name}: too little contrast: {browser.eval(CONTRAST)}")
            path = os.path.join(SHOTS, f"dashboard-{name}.png")
            browser.screenshot(path)
            check(os.path.getsize(path) > 20000, f"{path} shows nothing")
        keys_reach_everything(browser)
        a_look_at_a_tile_tells_how_the_worker_is(cluster, browser)
        check(not browser.errors, f"the console says: {browser.errors}")


def charts_agree(browser, address):
    """A curve has a point for each value of the service's series, as high as the value is; what the legend calls the newest is the newest."""
    series = api_of(address, "series?job=tiny&seconds=300")
    check(browser.eval("state.series.rows") == series["rows"][-browser.eval("state.series.rows.length"):], "the page has other buckets than the service")
    phases = ["data", "forward", "backward", "communicate", "wait", "optimizer", "snapshot"]
    for chart, names in (("loss", {"loss": "loss"}), ("tokens", {"tokens/s": "tokens_per_second"}), ("world", {"with a rank": "world", "attached": "attached"}),
                         ("phases", {name: f"{name}_s" for name in phases})):
        for shown, name in names.items():
            values = [row[series["columns"].index(name)] for row in series["rows"]]
            newest = [value for value in values if value is not None][-1]
            said = browser.eval(f"document.querySelector('#chart-{chart} [data-latest={json.dumps(shown)}]').dataset.value")
            check(float(said) == newest, f"{chart}: {shown} is {said}, not {newest}")
    values = [row[series["columns"].index("loss")] for row in series["rows"]]
    values = [value for value in values if value is not None][-browser.eval("state.series.rows.length"):]
    points = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", browser.eval("document.querySelector('#chart-loss path').getAttribute('d')"))]
    check(len(points) == len(values) and max(values) > min(values), f"{len(points)} points for {len(values)} values")
    scale = (max(points) - min(points)) / (max(values) - min(values))
    check(scale > 0 and all(abs(max(points) - (value - min(values)) * scale - point) <= 0.2 for value, point in zip(values, points)), f"{points} do not show {values}")


def numbers_agree(cluster, browser, address):
    """Nothing moves any more: exactly the service's numbers."""
    job, goodput = cluster.job(), cluster.call("GetGoodput", api.GetGoodputRequest(job="tiny"), api.GetGoodputResponse)
    check(value_of(browser, "#fact-step span") == job.steps_done, f"step: {text_of(browser, '#fact-step')}, not {job.steps_done}")
    check(text_of(browser, "#fact-loss").startswith(f"{job.result.loss:.4f}"), f"loss: {text_of(browser, '#fact-loss')}, not {job.result.loss}")
    for field in goodput.total.DESCRIPTOR.fields:
        wanted = getattr(goodput.total, field.name)
        shown = value_of(browser, f"[data-class={field.name}]")
        check(shown == wanted or (wanted == 0 and shown != shown), f"{field.name}: {shown} s, not {wanted} s")
    numbers = [int(n) for n in browser.eval("[...document.querySelectorAll('#checkpoints td:first-child')].map(e => e.innerText).join()").split(",")]
    check(numbers == [c.number for c in cluster.checkpoints()][::-1], f"checkpoints: {numbers}")
    for one in cluster.checkpoints():
        took_s = (one.committed_wall_us - one.ordered_wall_us) * 1e-6
        check(0 < took_s < 600 and abs(value_of(browser, f"[data-took='{one.number}']") - took_s) < 1e-6, f"checkpoint {one.number} took {took_s} s")
    events = text_of(browser, "#events")
    check("job_cancelled" in events and EVIL in events and not browser.eval("document.images.length"), f"events: {events}")
    charts_agree(browser, address)


def however_many_workers(browser, address):
    """With one worker and with 10,000, on a phone and in a wide window, light and dark: all are there, nothing is wider than its window, all can be read."""
    for count in (1, 10000):
        for name, width, dark in (("phone", 390, True), ("wide", 1440, False)):
            look(browser, address, width, 844, dark)
            tiles = browser.eval(f"""(() => {{
                refresh = async () => {{}};
                state.workers = Array.from({{length: {count}}}, (_, i) => ({{name: 'worker-' + i, host: 'host-' + (i >> 3), job: 'tiny', coordinates: {{dp: i, tp: 0, pp: 0}}, rank: i, leaves: 1, backend: 'cuda', threads: 1,
                    state: i % 100 == 7 ? 'suspect' : 'member', reason: i % 100 == 7 ? 'silent for 3 s' : ''}}));
                state.accounts = state.workers.filter((_, i) => i % 1000 == 9).map(w => ({{worker: w.name, now: 'down', seconds: {{down: 60}}}}));
                write_workers(); write_health();
                return [...document.querySelectorAll('[data-worker]')].map(e => e.className).join(); }})()""").split(",")
            check(len(tiles) == count and sum("suspect" in tile for tile in tiles) == count // 100, f"{len(tiles)} tiles of {count}")
            check(browser.eval("document.querySelector('#workers ul').clientHeight <= innerHeight"), "the tiles push what follows out of reach")
            check(browser.eval("document.documentElement.scrollWidth") <= width, f"{count} workers, {name}: wider than its window")
            check(not browser.eval(CONTRAST) and not browser.eval(NAMELESS), f"{count} workers, {name}: {browser.eval(CONTRAST)} {browser.eval(NAMELESS)}")
            alarms = text_of(browser, "#alarms")
            if count > 1:  # a switch that fails must not push all else off the page
                check("100 workers are suspect: worker-7 on host-0 (silent for 3 s), worker-107 on host-13 (silent for 3 s), worker-207" in alarms and "and 97 more" in alarms, alarms[:500])
                check("10 workers are down, for 60.0 s at most" in alarms and "and 7 more" in alarms and len(alarms.splitlines()) < 12, alarms[:500])
                browser.screenshot(os.path.join(SHOTS, f"dashboard-{count}-{name}.png"))
    browser.eval("document.querySelector('[data-worker=worker-7]').dispatchEvent(new Event('mouseover', {bubbles: true}))")
    browser.wait("document.querySelector('#worker-tip').style.display === 'block'")
    said = text_of(browser, "#worker-tip")
    check(all(word in said for word in ("worker-7: suspect", "rank 7", "host host-0", "cuda, 1 thread", "silent for 3 s")), said)
    look(browser, address)


def test_numbers_agree_with_many_workers_and_without_a_coordinator():
    with watched(2) as (cluster, browser, address):
        cluster.submit(tiny_job(cluster, steps=10000000, eval__every=0, checkpoint_every=200))
        cluster.wait_event("checkpoint_committed")

        def curve():  # written every ten seconds
            series = api_of(address, "series?job=tiny&seconds=300")
            return sum(row[series["columns"].index("loss")] is not None for row in series["rows"])
        cluster.wait_until(lambda: curve() >= 3, 60, "there is no curve")
        cluster.cancel(reason=EVIL)
        cluster.wait_over()
        look(browser, address)
        browser.wait("document.querySelector('#jobs tbody')?.innerText.includes('cancelled')")
        numbers_agree(cluster, browser, address)
        however_many_workers(browser, address)
        check(not browser.errors, f"the console says: {browser.errors}")
        cluster.coordinator.kill()
        browser.wait("document.querySelector('#alarms').innerText.includes('does not answer')", 40)
        check("does not answer" in text_of(browser, "#health"), text_of(browser, "#health"))
        check(all("ERR_CONNECTION" in e or "Failed to fetch" in e for e in browser.errors), f"the console says: {browser.errors}")
        cluster.start_coordinator(flags=[*FAST, "--http", f"{address[0]}:{address[1]}"])
        browser.wait("!document.querySelector('#alarms').innerText.includes('does not answer')", 40)


if __name__ == "__main__":
    main([value for name, value in list(globals().items()) if name.startswith("test_")])
