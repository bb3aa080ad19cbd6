"""A headless Chromium that does what a test says, over the DevTools protocol on two pipes (no driver, no socket).

    with Browser(dir) as browser:
        browser.open("http://127.0.0.1:7071/")
        browser.wait("document.title == 'Muster'")
        browser.screenshot("page.png")
        browser.errors            # what the console complained about
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time

from harness import SLOW, Failure, Skipped


class Browser:
    def __init__(self, directory):
        program = shutil.which("chromium")
        if not program:
            raise Skipped("there is no chromium (Debian package chromium)")
        self.profile = os.path.join(directory, "chromium")
        self.errors, self.number, self.buffer, self.session = [], 0, b"", None
        self.answers, self.credentials, self.challenges = False, None, 0
        to_read, self.to = os.pipe()
        self.out, out_write = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run",
                 "--disable-extensions", "--mute-audio", f"--user-data-dir={self.profile}", "--remote-debugging-pipe", "about:blank"]

        def pipes():  # the protocol is spoken on descriptors 3 and 4
            low, high = os.dup(to_read), os.dup(out_write)
            os.dup2(low, 3)
            os.dup2(high, 4)
        with open(os.path.join(directory, "chromium.log"), "wb") as log:
            self.process = subprocess.Popen([program, *flags], stdout=log, stderr=log, preexec_fn=pipes, close_fds=False)
        os.close(to_read)
        os.close(out_write)

    def __enter__(self):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        return self

    def __exit__(self, *ignored):
        self.process.kill()
        self.process.wait()
        os.close(self.to)
        os.close(self.out)
        shutil.rmtree(self.profile, ignore_errors=True)

    def read(self, deadline):
        while b"\0" not in self.buffer:
            if not select.select([self.out], [], [], max(0, deadline - time.monotonic()))[0]:
                raise Failure("the browser does not answer")
            data = os.read(self.out, 1 << 20)
            if not data:
                raise Failure("the browser has ended")
            self.buffer += data
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def note(self, message):
        method, params = message.get("method"), message.get("params", {})
        if method == "Fetch.requestPaused":
            self.send("Fetch.continueRequest", requestId=params["requestId"])
        elif method == "Fetch.authRequired":
            self.challenges += 1
            answer = {"response": "CancelAuth"}
            if self.credentials:
                answer = {"response": "ProvideCredentials", "username": self.credentials[0], "password": self.credentials[1]}
            self.send("Fetch.continueWithAuth", requestId=params["requestId"], authChallengeResponse=answer)
        elif method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"].get("exception", {}).get("description") or params["exceptionDetails"]["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))

    def send(self, method, **params):
        self.number += 1
        request = {"id": self.number, "method": method, "params": params}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.to, json.dumps(request).encode() + b"\0")
        return self.number

    def call(self, method, limit_s=30, **params):
        number = self.send(method, **params)
        deadline = time.monotonic() + limit_s * SLOW
        while True:
            answer = self.read(deadline)
            if answer.get("id") == number:
                if "error" in answer:
                    raise Failure(f"{method}: {answer['error']}")
                return answer["result"]
            self.note(answer)

    def open(self, url):
        self.call("Page.navigate", url=url)

    def answer_challenges(self, credentials):
        """What the user says when a server asks who it is: (name, password), or None: nothing. self.challenges counts the questions."""
        if not self.answers:
            self.answers = True
            self.call("Fetch.enable", handleAuthRequests=True)
        self.credentials = credentials

    def eval(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise Failure(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, expression, limit_s=20):
        deadline = time.monotonic() + limit_s * SLOW
        while True:
            if self.eval(f"!!({expression})"):
                return
            if time.monotonic() > deadline:
                raise Failure(f"not within {limit_s * SLOW:.0f} s: {expression}")
            time.sleep(0.05)

    def window(self, width, height, dark=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def key(self, key):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode={"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37}.get(key, 0))

    def screenshot(self, path):
        image = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True,
                          clip={**self.eval("({x: 0, y: 0, width: innerWidth, height: Math.min(6000, document.documentElement.scrollHeight)})"), "scale": 1})
        with open(path, "wb") as file:
            file.write(base64.b64decode(image["data"]))
