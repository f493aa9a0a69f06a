//! Which file of a Python package imports which other, when it is itself imported.
//!
//! Imports in functions and under `TYPE_CHECKING` draw no arrow: they do not run then, so they
//! cannot meet a module that is half made. A name leads to the file that defines it, through each
//! `__init__.py` that hands it on; what only hands on draws no arrow.

use std::collections::BTreeMap;

use super::graph::Graph;
use crate::tree::File;

/// A name that one file takes from a module.
struct Import {
    module: String,
    /// Nothing for `import module`.
    name: Option<String>,
    /// What it is called here.
    called: String,
    line: usize,
}

/// Arrows between the modules below a folder, which ends in a slash.
pub(crate) fn arrows(files: &[File], folder: &str) -> Graph {
    let root = folder.trim_end_matches('/');
    let package = root.rsplit('/').next().unwrap_or_default();
    let inside = files
        .iter()
        .filter(|file| file.path.starts_with(folder) && file.path.ends_with(".py"));
    let modules: BTreeMap<String, (&File, Vec<Import>)> = inside
        .map(|file| {
            let path = file.path[folder.len()..].trim_end_matches(".py");
            let name = format!("{package}/{path}").replace('/', ".");
            let name = name.trim_end_matches(".__init__").to_owned();
            (name.clone(), (file, imports(file, &name)))
        })
        .collect();
    let mut graph = Graph::default();
    for (file, imports) in modules.values() {
        for import in imports {
            let handed_on = file.path.ends_with("/__init__.py") && !uses(file, &import.called);
            let target = import.name.as_deref();
            let to = origin(&modules, &import.module, target, 8);
            if let Some(to) = to.filter(|_| !handed_on) {
                let from = &file.path[folder.len()..];
                let place = format!("{from}:{}", import.line);
                graph.add(from, &to[folder.len()..], &place);
            }
        }
    }
    graph
}

/// The file that a module's name comes from; nothing when it is not of this package.
fn origin<'a>(
    modules: &BTreeMap<String, (&'a File, Vec<Import>)>,
    module: &str,
    name: Option<&str>,
    hops: usize,
) -> Option<&'a str> {
    let submodule = name.and_then(|name| modules.get(&format!("{module}.{name}")));
    if let Some((file, _)) = submodule {
        return Some(&file.path);
    }
    let (file, imports) = modules.get(module)?;
    let handed = imports
        .iter()
        .find(|import| Some(import.called.as_str()) == name && import.name.is_some());
    let handed = handed.filter(|_| hops > 0 && file.path.ends_with("/__init__.py"));
    match handed {
        Some(import) => origin(modules, &import.module, import.name.as_deref(), hops - 1),
        None => Some(&file.path),
    }
}

/// Whether the text names it outside of imports and `__all__`, where it stands in quotes.
fn uses(file: &File, name: &str) -> bool {
    let quoted = format!("\"{name}\"");
    let mut importing = false;
    file.lines().any(|(_, line)| {
        importing |= line.starts_with("from ") || line.starts_with("import ");
        let inside = importing;
        importing &= line.contains('(') && !line.contains(')')
            || line.starts_with(' ') && !line.contains(')');
        let words = |line: &str| {
            line.split(|c: char| !c.is_alphanumeric() && c != '_')
                .any(|word| word == name)
        };
        !inside && words(&line.replace(&quoted, ""))
    })
}

/// Imports that run when the file is imported.
fn imports(file: &File, module: &str) -> Vec<Import> {
    let package = match file.path.ends_with("/__init__.py") {
        true => module,
        false => module.rsplit_once('.').map_or("", |(package, _)| package),
    };
    let mut found = Vec::new();
    let mut quoted = false;
    // How far in a function or a `TYPE_CHECKING` begins, until a line stands no further in.
    let mut within: Option<usize> = None;
    let lines: Vec<&str> = file.text.lines().collect();
    for (index, line) in lines.iter().enumerate() {
        let was_quoted = quoted;
        quoted ^= line.matches("\"\"\"").count() % 2 == 1;
        let text = line.trim_start();
        if was_quoted || text.is_empty() {
            continue;
        }
        let depth = line.len() - text.len();
        within = within.filter(|start| depth > *start);
        let later = ["def ", "async def ", "if TYPE_CHECKING", "if typing.TYPE"];
        if within.is_none() && later.iter().any(|start| text.starts_with(start)) {
            within = Some(depth);
        }
        if within.is_some() {
            continue;
        }
        let import = |module: String, name: Option<&str>, called: &str| Import {
            module,
            name: name.map(str::to_owned),
            called: called.to_owned(),
            line: index + 1,
        };
        if let Some(rest) = text.strip_prefix("import ") {
            for one in rest.split(',') {
                let (name, called) = one.split_once(" as ").unwrap_or((one, one));
                found.push(import(name.trim().to_owned(), None, called.trim()));
            }
        } else if let Some((from, names)) = text
            .strip_prefix("from ")
            .and_then(|rest| rest.split_once(" import "))
        {
            let mut names = names.to_owned();
            let rest = lines[index + 1..].iter();
            if names.contains('(') && !names.contains(')') {
                let inside = rest.take_while(|line| !line.trim_start().starts_with(')'));
                inside.for_each(|line| names.push_str(line));
            }
            for one in names.trim_matches(['(', ')']).split(',') {
                let one = one.trim().trim_matches(['(', ')']);
                let (name, called) = one.split_once(" as ").unwrap_or((one, one));
                if !name.is_empty() {
                    found.push(import(absolute(package, from), Some(name), called));
                }
            }
        }
    }
    found
}

/// `..a` seen from a package.
fn absolute(package: &str, from: &str) -> String {
    let name = from.trim_start_matches('.');
    let dots = from.len() - name.len();
    if dots == 0 {
        return name.to_owned();
    }
    let up = (1..dots).fold(package, |package, _| {
        package.rsplit_once('.').map_or("", |(above, _)| above)
    });
    [up, name].join(".").trim_end_matches('.').to_owned()
}
