// Opens Chrome traces with the parsers of three programs that people open them in, and holds what those found against what
// is in the file: catapult's importer (chrome://tracing), Chromium's DevTools, and speedscope's.
// usage: node open-trace.mjs CHROMIUM PARSERS TRACE..
//   PARSERS is a folder with node_modules of .ci/open-trace and catapult's trace_viewer_full.html.
import { createRequire } from 'node:module';
import { readFileSync, readdirSync } from 'node:fs';
import { join, resolve } from 'node:path';

const [executablePath, parsers, ...files] = process.argv.slice(2);
const { chromium } = createRequire(resolve(parsers, 'package.json'))('playwright-core');
const browser = await chromium.launch({ executablePath, headless: true, args: ['--no-sandbox'] });

// What the file says, counted without any of them.
function inFile(events) {
    const slices = events.filter(e => e.ph === 'X');
    const threads = new Set(slices.map(e => `${e.pid}/${e.tid}`));
    const count = ph => events.filter(e => e.ph === ph).length;
    return { slices: slices.length, threads: threads.size, processes: new Set(events.map(e => e.pid)).size,
        flows: count('s'), ends: count('f') };
}

// A page whose files are those of a folder.
async function page(folder, html) {
    const page = await browser.newPage();
    const errors = [];
    page.on('pageerror', e => errors.push(String(e)));
    await page.route('http://parsers.invalid/**', route => {
        const path = new URL(route.request().url()).pathname.slice(1);
        return path === '' ? route.fulfill({ contentType: 'text/html', body: html }) : route.fulfill({ path: join(folder, path) });
    });
    return { page, errors };
}

async function catapult(text) {
    const html = `<!DOCTYPE html><html><head><script src="node_modules/webcomponents.js/webcomponents.min.js"></script>
        <link rel="import" href="trace_viewer_full.html"></head><body></body></html>`;
    const { page: tab } = await page(parsers, html);
    await tab.goto('http://parsers.invalid/');
    await tab.waitForFunction(() => window.tr?.importer?.Import, null, { timeout: 60000 });
    const found = await tab.evaluate(text => {
        const model = new tr.Model();
        new tr.importer.Import(model, new tr.importer.ImportOptions()).importTraces([text]);
        const processes = Object.values(model.processes);
        const threads = processes.flatMap(p => Object.values(p.threads)).filter(t => t.sliceGroup.length);
        const slices = threads.flatMap(t => t.sliceGroup.slices);
        const bound = model.flowEvents.filter(f => f.startSlice && f.endSlice && f.startSlice !== f.endSlice);
        return { slices: slices.length, threads: threads.length, processes: processes.length, flows: bound.length,
            ends: model.flowEvents.length, nested: slices.filter(s => s.parentSlice).length,
            complaints: model.importWarnings.map(w => w.message) };
    }, text);
    await tab.close();
    return found;
}

// It ties flows only to events that begin at the same moment, so that those are not asked for.
async function devtools(text) {
    const tab = await browser.newPage();
    await tab.goto('devtools://devtools/bundled/devtools_app.html');
    const found = await tab.evaluate(async text => {
        const { TraceModel } = await import('devtools://devtools/bundled/models/trace/trace.js');
        const model = TraceModel.Model.createWithAllHandlers();
        await model.parse(JSON.parse(text).traceEvents, { metadata: {}, isFreshRecording: false, isCPUProfile: false });
        const { Renderer } = model.parsedTrace(0).data;
        const threads = [...Renderer.processes.values()].flatMap(p => [...p.threads.values()]);
        const roots = threads.map(t => t.tree?.roots.size ?? 0).reduce((a, b) => a + b, 0);
        return { slices: Renderer.entryToNode.size, threads: threads.filter(t => t.entries.length).length,
            processes: Renderer.processes.size, nested: Renderer.entryToNode.size - roots, complaints: [] };
    }, text);
    await tab.close();
    return found;
}

// It shows one thread after the other: how many there are stands beside the name. Ops that overlap are told on its console.
async function speedscope(text) {
    const folder = join(parsers, 'node_modules/speedscope/dist/release');
    const index = readdirSync(folder).includes('index.html') ? readFileSync(join(folder, 'index.html'), 'utf8') : '';
    const { page: tab, errors } = await page(folder, index);
    tab.on('console', line => ['warning', 'error'].includes(line.type()) && !line.text().includes('GL Driver') && errors.push(line.text()));
    tab.on('dialog', dialog => (errors.push(dialog.message()), dialog.dismiss()));
    await tab.goto('http://parsers.invalid/');
    const file = { name: 'trace.json', mimeType: 'application/json', buffer: Buffer.from(text) };
    await tab.locator('input[type=file]').first().setInputFiles(file, { timeout: 30000 });
    const place = tab.getByText(/\(\d+\/\d+\)/).first();
    await place.waitFor({ timeout: 30000 }).catch(() => errors.push('it shows no thread'));
    const threads = Number(((await place.innerText().catch(() => '')).match(/\/(\d+)\)/) ?? [])[1]);
    await tab.close();
    return { threads, complaints: errors };
}

let failed = false;
for (const file of files) {
    const text = readFileSync(file, 'utf8');
    const wanted = { ...inFile(JSON.parse(text).traceEvents), nested: 0, complaints: [] };
    console.log(`${file}: ${JSON.stringify(wanted)}`);
    for (const [name, parse] of [['catapult', catapult], ['DevTools', devtools], ['speedscope', speedscope]]) {
        const found = await parse(text);
        const wrong = Object.keys(found).filter(key => JSON.stringify(found[key]) !== JSON.stringify(wanted[key]));
        console.log(`  ${wrong.length ? 'WRONG' : 'ok   '} ${name} ${JSON.stringify(found)}`);
        failed ||= wrong.length > 0 || wanted.flows !== wanted.ends;
    }
}
await browser.close();
process.exit(failed ? 1 : 0);
