"""A TCP proxy that loses an answer: what a client says arrives, what it is told about one call does not."""

import socket
import threading


class LosesAnswer:
    """Forwards both ways until `word` (of the call's path) has passed; then the coordinator's bytes are kept back until cut(). Later
    connections are forwarded whole."""

    def __init__(self, address, word):
        host, port = address.rsplit(":", 1)
        self.target, self.word = (host, int(port)), word.encode()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.asked, self.lost = threading.Event(), threading.Event()
        self.sockets = []
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
                far = socket.create_connection(self.target)
            except OSError:
                return
            self.sockets += [near, far]
            threading.Thread(target=self.forward, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self.forward, args=(far, near, False), daemon=True).start()

    def forward(self, source, sink, is_client):
        try:
            while data := source.recv(65536):
                if is_client and self.word in data and not self.lost.is_set():
                    self.asked.set()
                if not is_client and self.asked.is_set() and not self.lost.is_set():
                    continue
                sink.sendall(data)
        except OSError:
            pass

    def cut(self):
        """The connection breaks; from now on nothing is lost."""
        self.lost.set()
        for one in self.sockets[:2]:
            one.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.listener.close()
        for one in self.sockets:
            one.close()
