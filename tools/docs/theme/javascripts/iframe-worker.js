// Search runs in a worker, and browsers start no worker from the file system. There it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const page = this.frame.contentDocument;
      page.open();
      page.write("<!doctype html><body>");
      page.close();
      this.frame.contentWindow.postMessage = (data) => {
        const message = new MessageEvent("message", { data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      };
      const script = page.createElement("script");
      this.ready = new Promise((resolve) => { script.onload = resolve; });
      script.src = url;
      page.body.append(script);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
