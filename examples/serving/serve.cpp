// Serves a package of AOTInductor without Python: serve LIBRARY PACKAGE INPUTS OUTPUT [WEIGHTS]
// INPUTS: a list of tensors; OUTPUT: a tensor; WEIGHTS: tensors by name. Files of torch.save.
#include <dlfcn.h>

#include <fstream>
#include <iostream>
#include <iterator>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

static c10::IValue read(const char *path) {
    std::ifstream file(path, std::ios::binary);
    TORCH_CHECK(file, path, ": cannot be read");
    return torch::jit::pickle_load({std::istreambuf_iterator<char>(file), {}});
}

static int serve(int argc, char **argv) {
    TORCH_CHECK(argc >= 5, "usage: serve LIBRARY PACKAGE INPUTS OUTPUT [WEIGHTS]");
    // Before the package, which looks its operators up. A program may link the library instead.
    TORCH_CHECK(dlopen(argv[1], RTLD_NOW), dlerror());
    torch::inductor::AOTIModelPackageLoader package(argv[2]);
    const std::string fingerprint = package.get_metadata()["weights"]; // as export.py writes it, or ""
    std::cout << "package holds weights " << (fingerprint.empty() ? "without a fingerprint" : fingerprint)
              << "\n";
    if (argc > 5) {
        std::unordered_map<std::string, at::Tensor> weights;
        for (const auto &entry : read(argv[5]).toGenericDict())
            weights[entry.key().toStringRef()] = entry.value().toTensor();
        package.load_constants(weights, /*use_inactive=*/false, /*check_full_update=*/true);
        std::cout << "replaced by " << argv[5] << "\n";
    }
    std::vector<at::Tensor> inputs;
    const c10::IValue list = read(argv[3]);
    for (const c10::IValue &input : list.toListRef()) inputs.push_back(input.toTensor());
    const std::vector<char> bytes = torch::jit::pickle_save(package.run(inputs).at(0));
    std::ofstream(argv[4], std::ios::binary).write(bytes.data(), bytes.size());
    return 0;
}

int main(int argc, char **argv) {
    try {
        return serve(argc, argv);
    } catch (const std::exception &error) {
        std::cerr << error.what() << "\n";
        return 1;
    }
}
