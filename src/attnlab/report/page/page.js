// The table (DataTables) decides what the plots (Bokeh) and the samples show.
const text = (id) => document.getElementById(id).textContent;
const { jQuery: $ } = await import(URL.createObjectURL(new Blob([text("datatables")], { type: "text/javascript" })));
const { figures, groups, tasks, measures } = JSON.parse(text("data"));

const dark = matchMedia("(prefers-color-scheme: dark)");
const shade = () => document.documentElement.classList.toggle("dark", dark.matches);
dark.addEventListener("change", shade);
shade();

const filters = [...document.querySelectorAll("#runs th")].map((th, i) => ({
  targets: i,
  columnControl: th.classList.contains("number") ? [["search"]] : [["searchList"]],
}));
const table = $("#runs").DataTable({
  autoWidth: false,
  columnDefs: filters,
  language: { search: "", searchPlaceholder: "Search all columns", info: "_START_ to _END_ of _TOTAL_ runs", infoEmpty: "no runs", infoFiltered: "(_MAX_ in all)" },
  layout: { topStart: "search", topEnd: "pageLength", bottomStart: "info", bottomEnd: "paging" },
  order: [],
  pageLength: 10,
});

const plots = {};
for (const item of figures) {
  await Bokeh.embed.embed_item(item);
  plots[item.target_id] = Bokeh.documents.at(-1);
}

const numbers = (which) => table.rows({ search: "applied", ...which }).nodes().toArray().map((tr) => +tr.dataset.run);

const drawn = {};
function draw(id, runs, column) {
  const marks = plots[id].get_model_by_name("marks");
  const all = [...marks.data_source.get("number")];
  const indices = all.flatMap((run, i) => (runs.has(run) ? [i] : []));
  drawn[id] = new Set(indices.map((i) => all[i]));
  document.getElementById(id).classList.toggle("empty", !indices.length);
  marks.visible = indices.length > 0;
  if (!marks.visible) return;  // Bokeh complains on the console of a plot without a range
  if (column) marks.glyph.x = { field: column };
  plots[id].get_model_by_name("shown").indices = indices;
}

function moved(menu, groups, runs) {  // whether a menu went to a group that has one of these runs
  const has = (group) => group.runs.some((run) => runs.includes(run));
  const other = !menu || has(groups[menu.value]) ? -1 : groups.findIndex(has);
  if (other >= 0) menu.value = other;
  return other >= 0;
}

function update() {
  const page = numbers({ page: "current" });
  const passed = numbers({});
  const choice = document.getElementById("group");
  if (moved(choice, groups, passed)) return choose();
  const task = document.getElementById("task");
  moved(task, tasks, page);
  for (const option of task?.options ?? []) option.disabled = !tasks[option.value].runs.some((run) => page.includes(run));
  const trained = new Set(tasks[task?.value]?.runs.filter((run) => page.includes(run)));
  const group = groups[choice?.value];
  for (const select of document.querySelectorAll("select[data-plot]")) {
    const plot = plots[select.dataset.plot];
    const values = plot.get_model_by_name("marks").data_source.get(select.value);
    const runs = new Set(passed.filter((run) => group.runs.includes(run) && Number.isFinite(values[run])));
    plot.roots()[0].left[0].axis_label = group.metric;
    draw(select.dataset.plot, runs, select.value);
  }
  for (const loss of document.querySelectorAll("[data-loss]")) draw(loss.id, trained);
  for (const legend of document.querySelectorAll(".names")) {
    const ids = [...document.querySelectorAll(legend.dataset.plots)].map((plot) => plot.id);
    for (const name of legend.children) {
      name.hidden = !JSON.parse(name.dataset.runs).some((run) => ids.some((id) => drawn[id].has(run)));
    }
  }
  for (const line of document.querySelectorAll("[data-of]")) line.hidden = !page.includes(+line.dataset.of);
}

function choose() {  // a measure that the runs of this group have, for each plot another one
  const group = groups[document.getElementById("group").value];
  const left = measures.filter((name) => group.measures.includes(name));
  for (const select of document.querySelectorAll("select[data-plot]")) {
    for (const option of select.options) option.disabled = !group.measures.includes(option.value);
    const wanted = select.dataset.first;
    select.value = left.includes(wanted) ? wanted : left[0] ?? measures[0];
    if (left.length > 1) left.splice(left.indexOf(select.value), 1);
  }
  update();
}

table.on("draw", update);
for (const select of document.querySelectorAll("select[data-plot]")) select.addEventListener("change", update);
document.getElementById("group")?.addEventListener("change", choose);
document.getElementById("task")?.addEventListener("change", update);
document.getElementById("group") ? choose() : update();

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-copy]");
  if (button) {
    getSelection().selectAllChildren(button.parentElement.querySelector("pre"));
    button.textContent = document.execCommand("copy") ? "copied" : "press Ctrl+C";
    return;
  }
  const row = event.target.closest("tr[data-run]");
  if (!row || !getSelection().isCollapsed) return;
  const child = table.row(row).child;
  if (child.isShown()) child.hide();
  else child(document.getElementById(`run-${row.dataset.run}`).content.cloneNode(true).firstElementChild).show();
  row.querySelector("button").setAttribute("aria-expanded", child.isShown());
});
document.documentElement.dataset.ready = "";
