// What libllama counts on a model file, nothing allocated (llama.cpp b11434).
//
//   record quantize FILE FTYPE            llama-quantize's own log of a dry run, on stderr
//   record memory FILE N_CTX N_UBATCH N_SEQ_MAX KV_UNIFIED SWA_FULL FLASH_ATTN TYPE
//                                         bytes of model, context and compute buffers
#include "llama.h"
#include "llama-ext.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

static bool verbose = false;

static void log_errors(ggml_log_level level, const char * text, void *) {
    if (verbose || level >= GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

static ggml_type type_named(const char * name) {
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const char * known = ggml_type_name((ggml_type) i);
        if (known && !strcmp(known, name)) {
            return (ggml_type) i;
        }
    }
    fprintf(stderr, "no type is called %s\n", name);
    exit(2);
}

static int quantize(const char * path, int ftype) {
    auto params = llama_model_quantize_default_params();
    params.ftype = (llama_ftype) ftype;
    params.dry_run = params.allow_requantize = true;
    params.nthread = 1;
    verbose = true;
    return (int) llama_model_quantize(path, "/dev/null", &params);
}

static int memory(const char * path, char ** options) {
    auto model_params = llama_model_default_params();
    model_params.no_alloc = true;
    model_params.load_mode = LLAMA_LOAD_MODE_NONE;
    model_params.use_extra_bufts = false;  // no repacked copies of the weights
    auto * model = llama_model_load_from_file(path, model_params);
    if (!model) {
        return 1;
    }
    auto params = llama_context_default_params();
    params.n_ctx = atoi(options[0]);
    params.n_ubatch = atoi(options[1]);
    params.n_batch = params.n_ubatch > 2048 ? params.n_ubatch : 2048;
    params.n_seq_max = atoi(options[2]);
    params.kv_unified = atoi(options[3]);
    params.swa_full = atoi(options[4]);
    params.flash_attn_type = (llama_flash_attn_type) atoi(options[5]);
    params.type_k = params.type_v = type_named(options[6]);
    auto * context = llama_init_from_model(model, params);
    if (!context) {
        return 1;
    }
    size_t weights = 0, cache = 0, compute = 0;
    for (auto & [_, buffers] : llama_get_memory_breakdown(context)) {
        weights += buffers.model;
        cache += buffers.context;
        compute += buffers.compute;
    }
    printf("%zu %zu %zu\n", weights, cache, compute);
    return 0;
}

int main(int argc, char ** argv) {
    llama_log_set(log_errors, nullptr);
    llama_backend_init();
    if (argc == 4 && !strcmp(argv[1], "quantize")) {
        return quantize(argv[2], atoi(argv[3]));
    }
    if (argc == 10 && !strcmp(argv[1], "memory")) {
        return memory(argv[2], argv + 3);
    }
    fprintf(stderr, "see the first lines of record_llama_cpp.cpp\n");
    return 2;
}
