// What the pages do themselves: the theme, the mark that shows whether a stream is open, and reconnecting streams.
(() => {
  const root = document.documentElement;

  const isDark = () => root.dataset.theme === "dark";

  // Under this class Swagger UI is dark.
  const darken = () => root.classList.toggle("dark-mode", isDark());
  darken();
  document.addEventListener("vectormill:theme", darken);

  document.getElementById("theme")?.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem("vectormill-theme", root.dataset.theme);
    document.dispatchEvent(new CustomEvent("vectormill:theme"));
  });

  const mark = document.getElementById("live-mark");
  document.addEventListener("htmx:sse:after:connection", () => mark && (mark.hidden = false));
  document.addEventListener("htmx:sse:close", () => mark && (mark.hidden = true));
  document.addEventListener("htmx:sse:error", (event) => {
    if (mark) mark.hidden = true;
    if (event.detail?.status === 401) location.reload(); // the session is over: the page leads to the login
  });

  // htmx reconnects when a stream breaks off, but not if its first request failed: the API may have been busy.
  document.addEventListener("htmx:finally:request", ({ detail: { ctx } }) => {
    const element = ctx.sourceElement;
    const url = element?.getAttribute?.("hx-sse:connect");
    const isStream = ctx.response?.raw.headers.get("Content-Type")?.includes("text/event-stream");
    if (!url || isStream || ctx.response?.status === 401) return;
    setTimeout(() => element.isConnected && htmx.ajax("GET", url, { source: element }), 2000);
  });
})();
