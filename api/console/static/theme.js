// Before anything is painted, set the theme that was chosen here, else the system's, and follow its changes.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => {
    const chosen = localStorage.getItem("vectormill-theme");
    root.dataset.theme = ["dark", "light"].includes(chosen) ? chosen : system.matches ? "dark" : "light";
    document.dispatchEvent(new CustomEvent("vectormill:theme"));
  };
  follow();
  system.addEventListener("change", follow);
})();
