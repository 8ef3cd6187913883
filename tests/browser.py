"Chromium without a window, spoken to over its debugging port: what a page asks for, what it complains of, what it measures."
import json
import re
import subprocess
import time
import urllib.request

from tornado.ioloop import IOLoop
from tornado.websocket import websocket_connect


class Browser:
    "One tab. `open` gives what the page requested and what it complained of; `ask` evaluates an expression in it."
    def __init__(self, program, profile):
        args = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0",
                "--disable-background-networking", f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(args, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        port = next(m[1] for line in self.process.stderr if (m := re.search(r"ws://127\.0\.0\.1:(\d+)/", line)))
        tab = next(t for t in json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json")) if t["type"] == "page")
        self.loop, self.number, self.events = IOLoop(make_current=False), 0, []
        self.socket = self.loop.run_sync(lambda: websocket_connect(tab["webSocketDebuggerUrl"], max_message_size=2**28))
        for domain in ("Page", "Runtime", "Network", "Log"): self.call(f"{domain}.enable")

    def call(self, method, **params):
        self.number += 1
        self.socket.write_message(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            said = self.read()
            if said.get("id") == self.number: return said["result"]
            self.events.append(said)

    def read(self): return json.loads(self.loop.run_sync(self.socket.read_message, timeout=120))

    def ask(self, expression): return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression, seconds=10):
        "Is it so, now or soon?"
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.ask(expression): return True
            time.sleep(0.05)
        return False

    def press(self, key):
        text = key if len(key) == 1 else ""
        for kind in ("keyDown", "keyUp"): self.call("Input.dispatchKeyEvent", type=kind, key=key, text=text if kind == "keyDown" else "")

    def size(self, width, height, dark=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def open(self, url):
        self.events = []
        self.call("Page.navigate", url=url)
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events): self.events.append(self.read())
        time.sleep(0.02)
        self.ask("1")  # whatever is told until now
        told = [(e.get("method"), e.get("params", {})) for e in self.events]
        asked = [p["request"]["url"] for m, p in told if m == "Network.requestWillBeSent"]
        wrong = [p["exceptionDetails"]["text"] for m, p in told if m == "Runtime.exceptionThrown"]
        wrong += [p["entry"]["text"] for m, p in told if m == "Log.entryAdded" and p["entry"]["level"] == "error"]
        return asked, wrong

    def close(self):
        self.socket.close()
        self.process.terminate()
        self.process.wait()
